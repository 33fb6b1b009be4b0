"""Parts of the suite for DCP plug-ins; use it through ``tieredckpt.testing.dcp_suite``."""
