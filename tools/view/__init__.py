"""Parts of ``tools.view``: running a model on a picture, PNG grids, the HTML page."""
