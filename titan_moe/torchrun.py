"""`python -m titan_moe.torchrun SUPERVISOR ...`: torchrun, as supervise.py (process SUPERVISOR) starts it.

torchrun ends its workers when a signal reaches it, and dies of those that it does not know (SIGUSR1) with its workers
left behind. Here it hears none of them, and ends with its supervisor; its workers learn from the environment whom to
end with and to obey (processes.py).
"""

import gc
import os
import signal
import sys

from titan_moe import processes

if __name__ == "__main__":
    processes.die_with(int(sys.argv.pop(1)))
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)  # before threads and workers, which inherit it
    os.environ[processes.TORCHRUN] = str(os.getpid())
    gc.disable()  # until all is imported: see runtime.py
    from torch.distributed.run import main

    gc.enable()
    main()
