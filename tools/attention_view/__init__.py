"""Parts of ``tools.show_attention``: running a model on a picture, PNG grids, the HTML page."""
