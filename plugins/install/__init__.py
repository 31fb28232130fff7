"""``python -m attn_plugins install TOOLKIT``: install a toolkit without changing the installed torch.

``recipes`` lists the parts of each toolkit, ``packages`` inspects the environment and calls pip, ``wheels`` compiles
packages against the installed torch and caches the wheels, ``checks`` tests installed toolkits, and ``command``
combines these.
"""
