"""``python -m attn_plugins install TOOLKIT``: install a toolkit against the torch that is there.

``recipes`` says what a toolkit consists of, ``packages`` looks at the environment and calls pip, ``wheels`` compiles a
package against the installed torch and keeps the wheel, ``checks`` runs what was installed, and ``command`` puts these
together.
"""
