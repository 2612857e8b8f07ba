"""Named ways to run a job, each as strong as we can make it, all in the same IR."""
