"""Several nodes: the leader and its lease, the node group, the agent of one node."""
