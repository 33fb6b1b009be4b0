"""A rank in its job: its session, the other ranks, hosts and the job's history."""
