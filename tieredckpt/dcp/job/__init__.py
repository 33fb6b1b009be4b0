"""Represents the job to one rank: session, ranks, hosts, history."""
