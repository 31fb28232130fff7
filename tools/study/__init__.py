"""Small trainings that compare settings, described in ``configs/studies``: python -m tools.study NAME."""
