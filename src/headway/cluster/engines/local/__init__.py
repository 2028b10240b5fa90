"""The engine `local`: a queue daemon on this machine."""
