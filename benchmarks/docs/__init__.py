"""Scripts that compute the tables and draw the pictures of the documentation."""
