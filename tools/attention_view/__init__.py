"""The parts of ``tools.show_attention``: running a model on a picture, the PNG grids, the HTML page."""
