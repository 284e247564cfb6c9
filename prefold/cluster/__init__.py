"""Many replicas that act as one engine: the lease book, the router, and replicas of several kinds."""
