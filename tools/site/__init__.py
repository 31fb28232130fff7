"""Generated parts of the site, which ``make docs`` adds to the pages of ``docs/``."""
