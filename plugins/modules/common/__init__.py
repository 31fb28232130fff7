"""What modules of several folders share."""
