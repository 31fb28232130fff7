"""``python -m attn_plugins install TOOLKIT``: install a toolkit without changing the installed torch."""
