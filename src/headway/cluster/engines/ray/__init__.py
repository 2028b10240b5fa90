"""The engine `ray`: a detached actor runs the jobs of a user on a Ray cluster."""
