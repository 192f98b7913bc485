"""Peaks: the accountant against hand counts, refusals, leaks, threads, and the out-of-memory predicate's table."""

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vae_tiles import peaks
from vae_tiles.fixtures import NAMES, full_width, tiny
from vae_tiles.peaks import (
    Follow,
    capped,
    decode_shape,
    dry_run,
    encode_shape,
    fingerprint,
    is_oom,
    mib_per_latent,
    predict_decode,
    predict_encode,
    to_meta,
    weight_bytes,
)

KIB = 1024


def floats(n, **kwargs):
    return torch.zeros(n, **kwargs)


# --- following ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_in_place_and_returned_inputs_are_free(device):
    x = floats(1024, device=device)
    with Follow() as follow:
        views = [x[:10], x.view(32, 32), x.T, x.expand(3, 1024), x.detach(), x.contiguous(), x.to(torch.float32)]
        x.add_(1).clamp_(0, 1)
        x[:5].fill_(3)
        F.relu(x, inplace=True)
        torch.add(x, x, out=x)
    assert (follow.now, follow.peak, follow.count) == (0, 0, 0)
    assert len(views) == 7


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lives_and_deaths(device):
    x = floats(1024, device=device)
    with Follow(timeline=True) as follow:
        y = (x + 1) * 2  # the sum dies as soon as the product is there
        assert (follow.now, follow.peak, follow.count) == (4 * KIB, 8 * KIB, 2)
        parts = y.chunk(4)
        del y
        assert follow.now == 4 * KIB  # the parts look at it
        del parts
        assert follow.now == 0
        assert [n for _, n in follow.timeline][:2] == [4 * KIB, 8 * KIB]
        kept = floats(3, device=device)
        assert follow.now == 512  # rounded
    del kept
    assert follow.now == 0  # also after the mode has ended


def test_several_outputs_of_one_storage_count_once():
    x = floats(1024)
    with Follow() as follow:
        a, b = torch.split(x + 1, 512)
        assert (follow.now, follow.count) == (4 * KIB, 1)
    assert a.shape == b.shape


def test_tensors_made_from_python_data_are_seen():
    with Follow() as follow:
        t = torch.tensor([1.0, 2.0])
        u = torch.arange(1000, dtype=torch.float32)
        assert follow.now == 512 + 4096
    assert len(t) == 2 and len(u) == 1000


def test_growing_in_place_is_seen_and_shrinking_too():
    with Follow() as follow:
        out = torch.empty(0)
        torch.add(floats(1024), 1, out=out)
        assert follow.now == 4 * KIB
        out.resize_(2048)
        assert follow.now == 8 * KIB
    before = torch.empty(1024)
    with Follow() as follow:
        before.resize_(2048)
        assert follow.now == 4 * KIB  # only what it grew by


def test_baseline_counts_toward_the_cap():
    with Follow(cap=8 * KIB, baseline=6 * KIB) as follow:
        with pytest.raises(torch.OutOfMemoryError):
            floats(1024)
        assert (follow.now, follow.peak) == (6 * KIB, 6 * KIB)


def test_skipped_devices():
    with Follow(cap=KIB, skip=("cpu",)) as follow:
        x = floats(10_000)
        assert (follow.now, follow.count) == (0, 0)
        with pytest.raises(torch.OutOfMemoryError):
            floats(1024, device="meta")
    assert len(x) == 10_000


def test_nested_modes_each_keep_their_books():
    with Follow() as outer:
        a = floats(1024)
        with Follow(cap=16 * KIB) as inner:
            b = a + 1
            F.scaled_dot_product_attention(*[torch.empty(1, 1, 8, 4)] * 3)
            assert inner.now == 4 * KIB
        assert outer.now == 8 * KIB  # no trace of the inner mode's rehearsals
        assert outer.work == inner.work == 8 * 8 * 8
    assert b.shape == a.shape


def test_forecasts_are_kept_apart_from_what_is_being_followed():
    vae = tiny("flux1")
    predict_decode(vae, 4, 4)
    with torch.no_grad(), Follow(cap=8 * KIB) as follow:
        run = predict_decode(vae, 31, 5)
        inner = dry_run(lambda x: dry_run(lambda y: y + y, (1 << 20,)).peak, (1 << 20,))
        x = floats(1024)
        with peaks.apart():
            floats(1 << 20)
            with Follow() as own:
                floats(1 << 20)
        with pytest.raises(torch.OutOfMemoryError):
            floats(1 << 20)
    assert run.peak > 8 * KIB and inner.peak == 0 and inner.out == 2 << 20 and own.peak == 4 << 20
    assert (follow.now, follow.count) == (4 * KIB, 1) and len(x)


def test_threads_do_not_see_each_other():
    seen, barrier = {}, threading.Barrier(2, timeout=30)

    def work(name, n):
        with Follow() as follow:
            x = floats(n)
            barrier.wait()
            y = x + 1
            barrier.wait()
            seen[name] = follow.now, follow.count
            del x, y

    threads = [threading.Thread(target=work, args=a) for a in (("a", 1024), ("b", 2048))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert seen == {"a": (8 * KIB, 2), "b": (16 * KIB, 2)}


def test_a_storage_may_die_on_another_thread():
    with Follow() as follow:
        box = [floats(1024)]
        t = threading.Thread(target=box.clear)
        t.start()
        t.join(30)
        assert follow.now == 0


def test_grad_and_inference_mode():
    x = torch.randn(1024, requires_grad=True)
    with Follow() as follow:
        loss = (x * x).exp().sum()  # exp's result is kept for its backward
        assert follow.now >= 4 * KIB
        loss.backward()
        del loss
        assert follow.now == 4 * KIB  # the gradient
    net = nn.Sequential(nn.Linear(64, 32), nn.Conv1d(5, 5, 1))
    x = torch.randn(2, 5, 64)
    works = []
    for context in (torch.no_grad, torch.inference_mode):
        with context(), Follow() as follow:
            net(x)
        works.append(follow.work)
    assert works == [2 * 5 * 64 * 32 + 2 * 5 * 5 * 32] * 2


# --- the cap --------------------------------------------------------------------------------------------------


def test_refused_before_anything_is_allocated(monkeypatch):
    ran = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            ran.extend(str(func) for t in peaks._tensors(out) if not t.is_meta)
            return out

    x = floats(1024)
    with Watch(), Follow(cap=6 * KIB) as follow:
        y = x + 1
        with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate .*4096 bytes.* for aten.mul.*cap of 6144"):
            x * 2
    assert ran == ["aten.add.Tensor"] and follow.peak == 4 * KIB and len(y)


def test_results_under_a_cap_are_the_same():
    vae = tiny("flux1")
    z = torch.randn(decode_shape(vae, 6, 5))
    with torch.no_grad():
        plain = vae.decode(z).sample
        with Follow() as free:
            vae.decode(z)
        with capped(free.peak) as follow:
            assert torch.equal(vae.decode(z).sample, plain)
        assert follow.peak == free.peak
        with capped(free.peak - 1), pytest.raises(torch.OutOfMemoryError):
            vae.decode(z)


def test_layout_copies_count_toward_the_cap():
    x, w = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((1, 64, 32, 32), (64, 64, 1, 1)))
    with Follow(cap=300_000, layout_copies=True), pytest.raises(torch.OutOfMemoryError):
        F.conv2d(x, w)
    with Follow(cap=300_000):
        F.conv2d(x, w)


@pytest.mark.parametrize("cap", [-1, float("nan"), "1GiB", None, True])
def test_a_cap_is_a_number(cap):
    with pytest.raises(ValueError, match="a cap is a number of bytes"), capped(cap):
        pass


def test_a_cap_of_nothing_refuses_everything():
    with capped(0), pytest.raises(torch.OutOfMemoryError):
        floats(1)


@pytest.mark.parametrize("name", ["flux1", "qwen-image"])
def test_failing_at_every_allocation_leaves_nothing_behind(name):
    vae = tiny(name)
    z = torch.zeros(decode_shape(vae, 2, 2))
    with torch.no_grad(), Follow() as follow:
        vae.decode(z)
    total = follow.count
    assert total > 30
    for k in range(1, total + 1):
        with torch.no_grad(), Follow(fail_at=k) as follow:
            try:
                vae.decode(z)
            except torch.OutOfMemoryError as error:
                assert f"entry {k} refused" in str(error)
            else:
                raise AssertionError(f"allocation {k} was not refused")
            if hasattr(vae, "clear_cache"):
                vae.clear_cache()  # the class itself keeps its cache when it fails
            assert follow.now == 0 and k - 3 <= follow.count < k  # an operator makes up to three
    with torch.no_grad(), Follow(fail_at=total + 1):
        vae.decode(z)


def test_an_error_keeps_no_tensor_alive_in_our_frames():

    def greedy():
        torch.cat([floats(1024) + 1, floats(1024)])

    with Follow(cap=12 * KIB) as follow:
        try:
            greedy()
        except torch.OutOfMemoryError as error:
            kept = error  # with its traceback
        assert follow.now == 0
    assert kept.__traceback__ is not None


def test_follow_itself_is_freed():
    follow = Follow()
    with follow:
        x = floats(10)
    gone = weakref.ref(follow)
    gc.disable()
    try:
        del follow
        assert gone() is None  # no cycle
    finally:
        gc.enable()
    del x


def test_capped_on_cuda_restores_the_fraction(monkeypatch):
    calls = []
    fakes = dict(is_available=lambda: True, empty_cache=lambda: None, mem_get_info=lambda d=None: (6 << 30, 8 << 30),
                 current_device=lambda: 0, memory_reserved=lambda d=None: 1 << 30,
                 get_per_process_memory_fraction=lambda d=None: 0.9,
                 set_per_process_memory_fraction=lambda f, d=None: calls.append(f))  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    with pytest.raises(RuntimeError, match="from the body"), capped(1 << 30):
        raise RuntimeError("from the body")
    assert calls == [0.25, 0.9]
    with capped(1 << 40):
        pass
    assert calls[2:] == [1.0, 0.9]


# --- work -----------------------------------------------------------------------------------------------------


def test_work_of_every_kind():
    cases = [
        (lambda: F.conv2d(torch.empty(2, 8, 9, 9), torch.empty(12, 2, 3, 3), groups=4), 2 * 12 * 49 * 2 * 9),
        (lambda: F.conv2d(torch.empty(1, 8, 9, 9), torch.empty(12, 8, 3, 3), stride=2, padding=1), 12 * 25 * 8 * 9),
        (lambda: F.conv3d(torch.empty(1, 4, 3, 5, 5), torch.empty(6, 4, 3, 1, 1)), 6 * 25 * 4 * 3),
        (lambda: F.conv_transpose2d(torch.empty(1, 8, 5, 5), torch.empty(8, 4, 2, 2), stride=2), 8 * 25 * 4 * 4),
        (lambda: torch.empty(3, 4) @ torch.empty(4, 5), 60),
        (lambda: torch.addmm(torch.empty(5), torch.empty(3, 4), torch.empty(4, 5)), 60),
        (lambda: torch.bmm(torch.empty(2, 3, 4), torch.empty(2, 4, 5)), 120),
        (lambda: torch.baddbmm(torch.empty(2, 3, 5), torch.empty(2, 3, 4), torch.empty(2, 4, 5)), 120),
        (lambda: F.linear(torch.empty(2, 3, 4), torch.empty(5, 4), torch.empty(5)), 120),
        (lambda: torch.empty(9) + 1, 0),
    ]
    for fn, want in cases:
        for device in ("cpu", "meta"):
            with torch.device(device), torch.no_grad(), Follow() as follow:
                fn()
            assert follow.work == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_linear_on_meta_as_on_devices(dtype):
    n = 2048
    mask = dict(attn_mask=torch.empty(n, n, device="meta", dtype=dtype))
    for kwargs in ({}, dict(is_causal=True), dict(scale=0.5), mask):
        q = torch.empty(1, 1, n, 64, device="meta", dtype=dtype)
        with torch.no_grad(), Follow() as follow:
            out = F.scaled_dot_product_attention(q, q, q, **kwargs)
        assert out.shape == q.shape and follow.work == n * n * 128
        assert follow.peak <= 3 * n * 64 * q.element_size() + 8 * n
    with torch.no_grad(), Follow() as follow:  # positional mask
        F.scaled_dot_product_attention(q, q, q, kwargs["attn_mask"], 0.0, False)
    assert follow.peak < n * n


def test_attention_in_three_dimensions_builds_its_table_everywhere():
    """HunyuanImage: few torches have a fused kernel for (B, N, C), so the table of all pairs is predicted;
    one that has it, as 2.14 on CPU, stays below."""
    peak = {}
    for device in ("cpu", "meta"):
        q = torch.empty(1, 512, 64, device=device)
        with torch.no_grad(), Follow() as follow:
            F.scaled_dot_product_attention(q, q, q)
        peak[device] = follow.peak
    assert peak["cpu"] <= peak["meta"]
    assert peak["meta"] >= 512 * 512 * 4


# --- copies without weights -----------------------------------------------------------------------------------


def test_to_meta_shares_weights_that_were_shared_and_keeps_formats():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
    net[1].weight = net[0].weight
    net[2].to(memory_format=torch.channels_last)
    copy = to_meta(net, torch.bfloat16)
    assert copy[0].weight is copy[1].weight
    assert peaks.channels_last(copy[2].weight) and not copy[2].weight.is_contiguous()
    assert copy[3].num_batches_tracked.dtype == torch.int64
    assert weight_bytes(copy[:2]) == 512 + 2 * 512


def test_to_meta_leaves_hooks_patches_and_wrappers_behind():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU())
    calls = []
    net[0].register_forward_hook(lambda *a: calls.append(1))
    net[0].register_forward_pre_hook(lambda *a: calls.append(1))
    net[0]._hf_hook, net[0]._old_forward = object(), net[0].forward
    net[0].forward = lambda x: 1 / 0
    state = {k: id(v) for k, v in net[0].__dict__.items()}
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", net)
    copy = to_meta(wrapped)
    assert type(copy) is nn.Sequential
    assert copy(torch.empty(1, 3, 5, 5, device="meta")).shape == (1, 4, 5, 5)
    assert not calls and {k: id(v) for k, v in net[0].__dict__.items()} == state


def test_to_meta_follows_modules_kept_in_lists_and_bound_methods():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.steps = [self.first, nn.Linear(4, 2)]
            self.call = self.steps[1].forward
            self.scale = torch.ones(2)
            self.table = {"a": self.scale}

        def forward(self, x):
            return self.call(self.steps[0](x)) * self.table["a"]

    odd = Odd()
    copy = to_meta(odd)
    assert copy(torch.empty(3, 4, device="meta")).shape == (3, 2)
    assert copy.steps[0] is copy.first and copy.table["a"] is copy.scale and copy.scale.is_meta
    assert not odd.scale.is_meta


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_the_real_thing_is_quick_and_touches_nothing(name):
    vae = tiny(name)
    before = {k: (id(v), v._version) for k, v in vae.state_dict(keep_vars=True).items()}
    attributes = set(vae.__dict__)
    start = time.perf_counter()
    copy = to_meta(vae, torch.bfloat16)
    assert time.perf_counter() - start < 0.5
    assert type(copy) is type(vae) and weight_bytes(copy) > 0
    predict_decode(vae, 4, 4), predict_encode(vae, 4, 4)
    assert {k: (id(v), v._version) for k, v in vae.state_dict(keep_vars=True).items()} == before
    assert set(vae.__dict__) == attributes


def test_fingerprints_tell_structures_apart():
    vae = tiny("flux1")
    other = tiny("flux1", seed=1)
    assert fingerprint(vae) == fingerprint(other)
    before = fingerprint(vae)
    vae.to(memory_format=torch.channels_last)
    assert fingerprint(vae) != before
    other.decoder.conv_in = nn.Sequential(other.decoder.conv_in)
    assert fingerprint(other) != before


# --- predictions ----------------------------------------------------------------------------------------------

PUBLISHED = {"qwen-image": 0.27, "qwen-image-2.1": 1.7, "hunyuan-image-2.1": 1.3, "flux1": 0.17, "flux2": 0.17}


@pytest.mark.parametrize("name", PUBLISHED)
def test_predictions_are_within_15_percent_of_what_was_published(name):
    figure = mib_per_latent(full_width(name))
    assert PUBLISHED[name] / peaks.BOUND <= figure <= PUBLISHED[name] * peaks.BOUND


@pytest.mark.parametrize("name", ["flux1", "qwen-image"])
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_meta_and_cpu_agree(name, op):
    """A prediction without layout copies is what following the real call on CPU finds."""
    vae = tiny(name)
    shape = decode_shape(vae, 8, 12) if op == "decode" else encode_shape(vae, 8, 12)
    x = torch.zeros(shape)
    with torch.no_grad(), Follow() as follow:
        out = getattr(vae, op)(x)
    predict = predict_decode if op == "decode" else predict_encode
    run = predict(vae, 8, 12, dtype=torch.float32)
    assert run.work == follow.work
    assert abs(run.peak - follow.peak) <= 0.001 * follow.peak + 4096
    assert out is not None


def test_a_remembered_prediction_costs_nothing():
    vae = full_width("wan")
    run = predict_decode(vae, 40, 24)
    start = time.perf_counter()
    assert predict_decode(vae, 40, 24) is run
    assert time.perf_counter() - start < 0.1


def test_tiling_left_on_by_other_code_does_not_change_a_prediction():
    vae = tiny("qwen-image")
    run = predict_decode(vae, 64, 64)
    vae.enable_tiling()
    assert predict_decode(vae, 64, 64) is run
    assert vae.use_tiling


def test_video_frames_and_batches_are_predicted():
    vae = tiny("wan")
    one, batch, frames = (predict_decode(vae, 8, 8, **k) for k in ({}, {"batch": 2}, {"frames": 3}))
    assert batch.out.shape[0] == 2 and batch.work == 2 * one.work
    assert frames.out.shape[2] == 9 and frames.peak > one.peak


def test_dry_run_takes_shapes_tensors_modules_and_methods():
    net = nn.Linear(8, 4)
    for fn, arg in ((net, (2, 8)), (net, torch.zeros(2, 8)), (net.forward, torch.Size((2, 8)))):
        run = dry_run(fn, arg, dtype=torch.float32)
        assert run.out.shape == (2, 4) and run.out.is_meta and run.work == 64 and run.peak == 512
    run = dry_run(lambda x, flag, state: (x + 1, state), (4,), True, None)
    assert run.out[0].shape == (4,) and run.out[1] is None and run.timeline == ()
    assert dry_run(lambda x: x + 1, (4,), timeline=True).timeline == (("aten.add.Tensor", 512),)


def test_dry_run_finds_the_largest_buffer():
    run = dry_run(lambda x: (x.repeat(2, 2) + 1).sum().float(), (1000, 1000))
    assert (run.largest, run.elements) == (8_000_000, 4_000_000)
    assert dry_run(lambda x: x.expand(5000, 1000, 1000)[:1], (1, 1000, 1000)).largest == 0  # a view


def test_vaes_that_cannot_be_read_say_so():
    with pytest.raises(ValueError, match="no convolution that reads the latent"):
        decode_shape(nn.Linear(2, 2), 8, 8)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.post_quant_conv = nn.Conv2d(4, 4, 1)

        def decode(self, z):
            raise ValueError("I only take sounds")

    with pytest.raises(ValueError, match="decodes neither .*sounds"):
        decode_shape(Odd(), 8, 8)


# --- out of memory --------------------------------------------------------------------------------------------

OOM = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.2 GiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuSOLVER error: CUSOLVER_STATUS_ALLOC_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "Failed: cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "HIP out of memory. Tried to allocate 1.13 GiB. GPU 0 has a total capacity of 15.98 GiB",
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported",
    "hipErrorOutOfMemory",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "rocblas error: rocblas_status_memory_error",
    "miopenStatusAllocFailed",
    "XPU out of memory. Tried to allocate 3.00 GiB (GPU 0; 15.11 GiB total capacity)",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "Allocation is out of device memory on current platform.",
    "MPS backend out of memory (MPS allocated: 8.87 GB, other allocations: 1.20 GB, max allowed: 9.07 GB).",
    "Invalid buffer size: 25.31 GB",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "687194767360 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:115] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.",
    "std::bad_alloc",
    "NPU out of memory. Tried to allocate 2.00 GiB",
    "Could not allocate tensor with 167772160 bytes. There is not enough GPU video memory available!",
]

NOT_OOM = [
    "",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: unspecified launch failure",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "miopenStatusUnknownError",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help.",
    "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
    "No space left on device",
    "The size of tensor a (512) must match the size of tensor b (384) at non-singleton dimension 3",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "index 5 is out of bounds for dimension 0 with size 4",
    "cannot allocate memory in static TLS block",
    "pointer runs out of memory bounds",
    "Input type (float) and bias type (c10::Half) should be the same",
    "MPS backend: unsupported operation",
]


@pytest.mark.parametrize("words", OOM)
def test_out_of_memory_in_every_spelling(words):
    assert is_oom(RuntimeError(words))
    assert not is_oom(ValueError(words))  # a mistake that quotes it
    wrapped = ValueError("decode failed")
    wrapped.__cause__ = RuntimeError(words)
    assert is_oom(wrapped)


@pytest.mark.parametrize("words", NOT_OOM)
def test_other_errors_are_not_out_of_memory(words):
    assert not is_oom(RuntimeError(words))


def test_out_of_memory_by_type_and_in_chains():
    class Ours(torch.OutOfMemoryError):
        pass

    assert all(map(is_oom, (torch.OutOfMemoryError(), torch.cuda.OutOfMemoryError(), MemoryError(), Ours())))
    assert not any(map(is_oom, (None, KeyboardInterrupt(), SystemExit(), RecursionError("maximum recursion depth"))))
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a  # a loop
    assert not is_oom(a)
    b.__context__, b.__cause__ = torch.OutOfMemoryError(), None
    b.__suppress_context__ = False
    assert is_oom(a)
    b.__suppress_context__ = True
    assert not is_oom(a)
    stop = KeyboardInterrupt()
    stop.__context__ = torch.OutOfMemoryError()
    assert not is_oom(stop)


def test_real_errors():
    with pytest.raises(RuntimeError) as oom:
        torch.empty(2**50)
    assert is_oom(oom.value)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(3) + torch.zeros(4)
    assert not is_oom(other.value)
