"""The scheduler: `decide(snapshot, now, policy)` returns decisions; a log records and replays them."""
