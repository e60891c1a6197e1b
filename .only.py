import sys, tempfile, pathlib
from tests.distributed.ranks import _run
module, names = sys.argv[1], sys.argv[2].split(",")
world = int(sys.argv[3]) if len(sys.argv) > 3 else 4
if __name__ == "__main__":
    for n, out in _run(world, "cpu", module, names, pathlib.Path(tempfile.mkdtemp())).items(): print(n, out[:3500])
