"""A real Ray cluster of several nodes on this machine, on loopback, in its own process tree.

Reads commands from standard input, one per line: `add NAME,NAME`, `remove NAME`; answers each with a line; exits when
its input ends. Started by the tests, never imported.
"""

import os
import socket
import sys
from pathlib import Path

os.environ |= {
    "RAY_TMPDIR": str(Path(sys.argv[1]).parent),  # also where it records its address; the folder must exist
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything listens on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or all other processes of a busy machine would come first
    "RAY_kill_idle_workers_interval_ms": "0",  # starting another takes over a second of a core
    # A dead node is noticed after two seconds; one that is slow on a busy machine is not taken for dead.
    "RAY_health_check_period_ms": "700",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}

from ray.cluster_utils import Cluster

NODE = {
    "num_cpus": int(sys.argv[2]),
    "num_gpus": int(sys.argv[3]),
    "memory": 4 << 30,
    "object_store_memory": 80 << 20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
}


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := probe.getsockname()[1]) >= 20000:
                return int(port)


def main() -> None:
    # Each process left out saves a second of a core: no test uses the autoscaler or reads logs through Ray.
    head = {"node_name": "m0", "gcs_server_port": free_port(), "temp_dir": sys.argv[1]}
    without = {"no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **head, **without})
    nodes = {}
    try:
        print(cluster.address, flush=True)
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "add":
                for node in name.split(","):
                    nodes[node] = cluster.add_node(wait=False, **NODE, node_name=node)
                cluster.wait_for_nodes()
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print(verb, name, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
