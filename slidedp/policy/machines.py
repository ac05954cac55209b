"""Rates of whole machines from a handful of figures: for questions about hardware one does not have.

Only `H200` rests on measurements (2 × H200, 32 cores); the others are estimates from data sheets and
what such machines usually reach. A probe of the real machine replaces all of this.
"""

from dataclasses import dataclass, replace

from slidedp.policy.rates import Rates, Workload


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Figures of one machine, whatever the number of ranks. Bytes, FLOPs and parameters per second."""

    name: str
    gpus: int
    device_bytes: float
    """Memory of one GPU that a run may take."""
    flops: float
    """Of one GPU in a compiled layer with 16-bit inputs."""
    device_memory: float
    """Bytes per second of one GPU's own memory."""
    link: float
    """One direction of one GPU's link to the host."""
    link_both: float
    """Each direction, when both are busy."""
    host_links: float
    """All links of the host in one direction together."""
    host_links_both: float
    """All links together, both directions counted."""
    gather: float
    """Whole bytes per second of an all-gather or reduce-scatter between GPUs."""
    peers: str
    """What GPUs talk over; see Rates.peers."""
    host_memory: float
    update: float
    """Parameters per second of the host's AdamW alone."""
    update_one_way: float
    update_both_ways: float
    gpu_update: float
    """Of one GPU, with state streamed from the host."""

    def rates(self, w: Workload) -> Rates:
        """The machine's rates for one workload."""
        forward = w.layer_flops / self.flops
        one_way = min(self.link, self.host_links / w.ranks)
        both_ways = min(self.link_both, self.host_links_both / 2 / w.ranks)
        streamed = 26 * w.ranks * self.gpu_update / self.host_links_both
        return Rates(
            forward=forward,
            backward_keep=2 * forward,
            backward_partial=((0.2, 2.4 * forward), (0.5, 2.1 * forward)),
            backward_recompute=3 * forward,
            head=w.head_flops / self.flops,
            embed_forward=2 * w.input_bytes / self.device_memory,
            embed_backward=(4 * w.input_bytes + w.embed_params * w.itemsize) / self.device_memory,
            device_copy=self.device_memory,
            up=self.link,
            down=self.link,
            both=self.link_both,
            up_all=one_way,
            down_all=one_way,
            both_all=both_ways,
            under_update=0.87,
            all_gather=self.gather,
            reduce_scatter=self.gather,
            broadcast=0.7 * self.gather,
            reduce=0.7 * self.gather,
            peers=self.peers,
            update=self.update,
            update_up=self.update_one_way,
            update_down=self.update_one_way,
            update_both=self.update_both_ways,
            sum_lanes=self.host_memory / 4,
            host_memory=self.host_memory,
            gpu_update=self.gpu_update / max(1.0, streamed),
        )


H200 = Machine(
    name="2 × H200, NVLink",
    gpus=2,
    device_bytes=135 * 2**30,
    flops=620e12,
    device_memory=3.5e12,
    link=55e9,
    link_both=43e9,
    host_links=106e9,
    host_links_both=136e9,
    gather=480e9,
    peers="fabric",
    host_memory=180e9,
    update=5.7e9,
    update_one_way=3.4e9,
    update_both_ways=2.3e9,
    gpu_update=3.5e9,
)
NVSWITCH = Machine(
    name="4 × H100, NVSwitch",
    gpus=4,
    device_bytes=76 * 2**30,
    flops=590e12,
    device_memory=2.7e12,
    link=52e9,
    link_both=42e9,
    host_links=200e9,
    host_links_both=300e9,
    gather=330e9,
    peers="fabric",
    host_memory=400e9,
    update=8e9,
    update_one_way=5.5e9,
    update_both_ways=4e9,
    gpu_update=3.2e9,
)
BRIDGED = Machine(
    name="2 × A800 PCIe, NVLink bridge",
    gpus=2,
    device_bytes=76 * 2**30,
    flops=200e12,
    device_memory=1.7e12,
    link=25e9,
    link_both=21e9,
    host_links=50e9,
    host_links_both=80e9,
    gather=180e9,
    peers="fabric",
    host_memory=200e9,
    update=4e9,
    update_one_way=3e9,
    update_both_ways=2.4e9,
    gpu_update=1.6e9,
)
UNBRIDGED = replace(BRIDGED, name="2 × A800 PCIe, bridge removed", gather=14e9, peers="host")
WORKSTATION = Machine(
    name="4 × RTX 4090, PCIe only",
    gpus=4,
    device_bytes=22.5 * 2**30,
    flops=120e12,
    device_memory=0.9e12,
    link=24e9,
    link_both=20e9,
    host_links=80e9,
    host_links_both=110e9,
    gather=9e9,
    peers="host",
    host_memory=180e9,
    update=3e9,
    update_one_way=2.2e9,
    update_both_ways=1.7e9,
    gpu_update=1.4e9,
)
MACHINES = (H200, NVSWITCH, BRIDGED, UNBRIDGED, WORKSTATION)
