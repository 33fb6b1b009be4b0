"""The last module that a fork server imports: forks leave alone what it has imported by then.

A garbage collection looks at every object, and writes to it: in a fork that copies all pages of
torch's modules, a fifth of a second in each process. What is frozen is never looked at again.
"""

import gc

gc.collect()
gc.freeze()
