"""The engine `ray`: a detached actor that owns the queue."""
