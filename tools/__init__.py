"""Scripts: one for each job."""
