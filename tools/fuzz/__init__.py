"""Random calls of every operator: valid ones are compared with the reference, broken ones must raise an error."""
