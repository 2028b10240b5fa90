"""A real Ray cluster of several nodes on this machine, on loopback, in a process tree of its own.

Reads words, a line each, from standard input: `add NAME,NAME`, `remove NAME`; answers each with a line; ends with its
input. Started by the tests, never imported by them.
"""

import os
import socket
import sys
from pathlib import Path

os.environ |= {
    "RAY_TMPDIR": str(Path(sys.argv[1]).parent),  # where it notes its address too, in a folder that must be there
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything listens on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or every other process of a busy machine would come first
    "RAY_kill_idle_workers_interval_ms": "0",  # to start another takes a core more than a second
    # One that is gone is missed after two seconds; one that is slow, on a busy machine, is not.
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
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            if (port := taken.getsockname()[1]) >= 20000:
                return int(port)


def main() -> None:
    # Every process that is left out here is a second of a core: nobody asks for nodes, nor reads logs through Ray.
    own = {"node_name": "m0", "gcs_server_port": free_port(), "temp_dir": sys.argv[1]}
    without = {"no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **own, **without})
    nodes = {}
    try:
        print(cluster.address, flush=True)
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "add":
                for one in name.split(","):
                    nodes[one] = cluster.add_node(wait=False, **NODE, node_name=one)
                cluster.wait_for_nodes()
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print(verb, name, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
