"""No garbage collection: imported first by the server of forked processes, until `frozen`.

Searches while modules are imported would take a fifth of its CPU time.
"""

import gc

gc.disable()
