"""The other hosts, whose rules hold, and saves whose fate is in doubt."""
