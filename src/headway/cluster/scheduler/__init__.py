"""The scheduler: `decide(snapshot) -> decisions`, policies, and the log that replays them."""
