"""Every variant of bench.py, built offline: what the README lists."""
import os, sys
sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import graphllm.machine
from graphllm.config import Target
graphllm.machine.detect_target = lambda device: Target("cuda", ("sm_90", "sms_132"), "H200")
import bench
from build import build, report
class Recorder:
    """Takes the kernel's place: builds what would be launched."""
    def __init__(self, kernel, loop): self.arg_names, self.loop = kernel.arg_names, loop
    def warmup(self, *given, grid, num_warps, launch_pdl, maxnreg=None, **constants):
        assert len(given) + len(constants) == len(self.arg_names) and list(constants) == self.arg_names[len(given):], (list(constants), self.arg_names)
        T = given[7]
        k = build(maxnreg=maxnreg, loop=self.loop, **constants, **({"T": 1} if T == 1 else {})); report(k, label)
bench.encoded_kernel, bench.encoded_loop_kernel = Recorder(bench.encoded_kernel, False), Recorder(bench.encoded_loop_kernel, True)
for layer, T, normed in bench.CASES:
    if T == 4: continue
    (a,) = bench.make(layer, T, normed, 1, "meta")
    for v, within in bench.kinds(layer, T, normed)[0]:
        label = f"{layer} T={T} {v} {'norm' if within else ''}"
        bench.launch(a, v, within, warm=True)
