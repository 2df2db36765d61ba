"""Instructions that only the Blackwell backward uses: they access another CTA's shared memory."""

import cutlass
from cutlass import Int32, cute


@cute.jit
def complete_tx_of(rank: int, barrier: cute.Pointer, size_bytes: int) -> None:
    """Does ``complete_tx`` at the counterpart of ``barrier`` in CTA ``rank`` of the cluster."""
    cute.arch.fence_acq_rel_cluster()
    cute.arch.inline_ptx(
        "{ .reg .b32 barrier; mapa.shared::cluster.u32 barrier, {$r0}, {$r2}; "
        "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [barrier], {$r1}; }",
        read_only_args=[barrier.toint(), Int32(size_bytes), Int32(rank)],
    )


@cute.jit
def bulk_send(
    source: cute.Pointer,
    target: cute.Pointer,
    size_bytes: cutlass.Constexpr[int],
    barrier: cute.Pointer,
    rank: Int32,
):
    """Starts a copy from this CTA's shared memory to that of CTA ``rank`` of the cluster.

    ``target``, and ``barrier``, which counts the bytes, are this CTA's counterparts of those meant.
    Called by a whole warp; addresses and size are multiples of 16 bytes.
    """
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "{ .reg .b32 target, barrier; "
            "mapa.shared::cluster.u32 target, {$r0}, {$r4}; "
            "mapa.shared::cluster.u32 barrier, {$r3}, {$r4}; "
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[target], [{$r1}], {$r2}, [barrier]; }",
            read_only_args=[
                target.toint(),
                source.toint(),
                Int32(size_bytes),
                barrier.toint(),
                Int32(rank),
            ],
        )
