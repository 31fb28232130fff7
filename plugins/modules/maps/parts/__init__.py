"""Parts of the modules on maps: normalization, projections and sums that several of them share."""
