"""The C++ that printed kernels share: vectors of memory, running values of reductions, and how threads combine them.

Every thread keeps its own running value, so that the loop needs no communication; the threads of a row are combined at
the end, those of a warp by shuffles, warps through shared memory, and blocks that share a row through a workspace. An
empty running value is neutral. Variances use sums shifted by each thread's first element and Chan's formula (Chan,
Golub, LeVeque 1983); sums of exponentials keep a running maximum (Milakov and Gimelshein 2018; relative to the largest
finite number where it is infinite, so that the sum is NaN only where an element is). NaN is larger and smaller than any
number, as in PyTorch. Deals in text. Knows nothing about regions.
"""

from __future__ import annotations

from collections.abc import Iterable

HALF_HEADERS = {"float16": "#include <cuda_fp16.h>\n", "bfloat16": "#include <cuda_bf16.h>\n"}

PACK = """
template <class T, int V>
struct __align__(sizeof(T) * V) Pack {
    T v[V];
};
"""
"""`V` neighbouring elements of memory, read or written in one access."""

FUNCTIONS = """
template <class T> __device__ T larger(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class T> __device__ T smaller(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
__device__ float larger(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
__device__ float smaller(float a, float b) { return a != a ? a : b != b ? b : fminf(a, b); }
"""
"""Extremes where NaN wins; of two zeros of fp32 the larger one is +0."""

DIFFERENCES = """
__device__ float difference(float a, float b) { return __fsub_rn(a, b); }
__device__ double difference(double a, double b) { return __dsub_rn(a, b); }
"""
"""Differences that the compiler makes no multiply-adds of (`nest.contracted`)."""

_LIMITS = """
template <class T> struct Limits;
template <> struct Limits<float> {
    static __device__ float top() { return 3.4028234663852886e38f; }
    static __device__ float infinity() { return __int_as_float(0x7f800000); }
};
template <> struct Limits<double> {
    static __device__ double top() { return 1.7976931348623157e308; }
    static __device__ double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
};
"""

STATES = {
    "sum": """
template <class T> struct Sum {
    T value = 0;
    __device__ void take(T x, long long) { value += x; }
    __device__ void merge(const Sum& o) { value += o.value; }
    __device__ void finish() {}
};
""",
    "prod": """
template <class T> struct Prod {
    T value = 1;
    __device__ void take(T x, long long) { value *= x; }
    __device__ void merge(const Prod& o) { value *= o.value; }
    __device__ void finish() {}
};
""",
    "max": """
template <class T> struct Max {
    T value = 0;
    bool some = false;
    __device__ void take(T x, long long) { value = some ? larger(value, x) : x; some = true; }
    __device__ void merge(const Max& o) { if (o.some) take(o.value, 0); }
    __device__ void finish() {}
};
""",
    "min": """
template <class T> struct Min {
    T value = 0;
    bool some = false;
    __device__ void take(T x, long long) { value = some ? smaller(value, x) : x; some = true; }
    __device__ void merge(const Min& o) { if (o.some) take(o.value, 0); }
    __device__ void finish() {}
};
""",
    "argmax": """
template <class T> struct ArgMax {
    T best = 0;
    long long at = -1;
    __device__ void take(T x, long long i) {
        bool ahead = x > best || (x != x && best == best);
        bool same = x == best || (x != x && best != best);
        if (at < 0 || ahead || (same && i < at)) { best = x; at = i; }
    }
    __device__ void merge(const ArgMax& o) { if (o.at >= 0) take(o.best, o.at); }
    __device__ void finish() {}
};
""",
    "argmin": """
template <class T> struct ArgMin {
    T best = 0;
    long long at = -1;
    __device__ void take(T x, long long i) {
        bool ahead = x < best || (x != x && best == best);
        bool same = x == best || (x != x && best != best);
        if (at < 0 || ahead || (same && i < at)) { best = x; at = i; }
    }
    __device__ void merge(const ArgMin& o) { if (o.at >= 0) take(o.best, o.at); }
    __device__ void finish() {}
};
""",
    "sumexp": """
template <class T> struct SumExp {
    T max = -Limits<T>::top(), sum = 0;
    static __device__ T bounded(T x) { return x < Limits<T>::top() ? x : Limits<T>::top(); }
    __device__ void take(T x, long long) {
        T e = exp(-fabs(difference(x, bounded(max))));
        sum = x > max ? sum * e + T(1) : sum + e;
        max = x > max ? x : max;
    }
    __device__ void merge(const SumExp& o) {
        T top = o.max > max ? o.max : max;
        sum = sum * exp(bounded(max) - bounded(top)) + o.sum * exp(bounded(o.max) - bounded(top));
        max = top;
    }
    __device__ void finish() {}
};
""",
    "welford": """
template <class T> struct Welford {
    T mean = 0, m2 = 0, count = 0, shifted = 0, part = 0, squares = 0;
    int held = 0;
    __device__ void take(T x, long long) {
        mean = count == T(0) ? x : mean;
        T d = x - mean;
        part += d;
        squares += d * d;
        count += T(1);
        if (++held == 256) fold();
    }
    __device__ void fold() {  // a sum of thousands of squares is rounded in the same direction again and again
        shifted += part;
        m2 += squares;
        part = squares = T(0);
        held = 0;
    }
    __device__ void finish() {
        fold();
        T over = T(1) / (count > T(1) ? count : T(1));
        bool overflowed = m2 == Limits<T>::infinity() && fabs(shifted) < Limits<T>::infinity();
        m2 = overflowed ? m2 : m2 - shifted * shifted * over;
        mean += shifted * over;
        shifted = 0;
    }
    __device__ void merge(const Welford& o) {
        if (o.count == T(0)) return;
        if (count == T(0)) { *this = o; return; }
        T total = count + o.count, gap = o.mean - mean, share = o.count / total;
        mean += gap * share;
        m2 += o.m2 + gap * gap * count * share;
        count = total;
    }
};
""",
}
"""Kind of a reduction to its running value: `take` an element, `finish` a thread's, `merge` those of two threads."""

STATE_NAMES = {
    "sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "argmax": "ArgMax", "argmin": "ArgMin",
    "sumexp": "SumExp", "welford": "Welford",
}  # fmt: skip
RESULTS = {"argmax": "at", "argmin": "at", "sumexp": "max", "welford": "mean"}
"""Member that is the result of a reduction with a single one; `value` where there is no entry."""

ALONG_ROW = """
template <class A> __device__ A lower(const A& a, int by) {
    A o = a;
    unsigned* words = reinterpret_cast<unsigned*>(&o);
#pragma unroll
    for (int i = 0; i < int(sizeof(A) / 4); i++) words[i] = __shfl_down_sync(0xffffffffu, words[i], by);
    return o;
}

// Threads along x share a row: all of them get what the row comes to.
template <int SHARE, class A> __device__ A combined(A a, char* space) {
    a.finish();
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) a.merge(lower(a, by));
    A* held = reinterpret_cast<A*>(space) + threadIdx.y * (SHARE / 32);
    if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = a;
    __syncthreads();
    a = held[0];
    for (int i = 1; i < SHARE / 32; i++) a.merge(held[i]);
    __syncthreads();
    return a;
}
"""
ALONG_COLUMN = """
// Threads along y share a row, neighbours along x have rows of their own: all get what their row comes to.
template <int SHARE, class A> __device__ A combined(A a, char* space) {
    a.finish();
    A* held = reinterpret_cast<A*>(space) + threadIdx.x;
    held[threadIdx.y * blockDim.x] = a;
    __syncthreads();
    for (int half = SHARE / 2; half > 0; half >>= 1) {
        if (threadIdx.y < half) {
            a.merge(held[(threadIdx.y + half) * blockDim.x]);
            held[threadIdx.y * blockDim.x] = a;
        }
        __syncthreads();
    }
    a = held[0];
    __syncthreads();
    return a;
}
"""
MERGED = """
template <int SHARE, class A> __device__ A merged(const A* parts, int count, int lane, char* space) {
    A a;
    for (int i = lane; i < count; i += SHARE) a.merge(parts[i]);
    return combined<SHARE>(a, space);
}
"""
"""What blocks that share a row have left in a workspace; `finish` of a finished value changes nothing."""


def prelude(
    dtypes: Iterable[str], kinds: Iterable[str], along_row: bool, extremes: bool, shared: bool, differences: bool
) -> str:
    """The C++ above a file's kernels.

    Args:
        dtypes: of everything in memory.
        kinds: of the reductions.
        along_row: whether the threads of a row are neighbours (along x), or along y.
        extremes: whether `larger` or `smaller` is called.
        shared: whether blocks share rows.
        differences: whether `difference` is called.
    """
    kinds = sorted(set(kinds))
    text = "".join(HALF_HEADERS[d] for d in sorted(set(dtypes)) if d in HALF_HEADERS) + PACK
    if extremes or {"max", "min"} & set(kinds):
        text += FUNCTIONS
    if differences or "sumexp" in kinds:
        text += DIFFERENCES
    if {"sumexp", "welford"} & set(kinds):
        text += _LIMITS
    text += "".join(STATES[kind] for kind in kinds)
    if kinds:
        text += ALONG_ROW if along_row else ALONG_COLUMN
        text += MERGED if shared else ""
    return text


__all__ = ["RESULTS", "STATES", "STATE_NAMES", "prelude"]
