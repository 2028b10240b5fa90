"""The engine `kubernetes`: manifests."""
