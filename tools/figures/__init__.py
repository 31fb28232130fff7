"""The papers' figures that an architecture alone determines, beside our models' own."""
