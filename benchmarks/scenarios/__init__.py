"""One module per part of the engine; each scenario turns measured processes into rows."""
