"""The site: what ``make docs`` adds to the pages of ``docs/`` while mkdocs builds them."""
