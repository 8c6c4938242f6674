"""Who am I, and who are the others?

drumline run -n 4 examples/01_hello.py
torchrun --nproc-per-node 2 examples/01_hello.py
"""

from coordinator import Coordinator

with Coordinator() as coor:
    greetings = coor.allgather(f"hello from rank {coor.rank} of {coor.world_size}".encode())
    if coor.is_master():
        print("\n".join(greeting.decode() for greeting in greetings))
