// Small kernels, each in a correct version and with a fault that the emulator must find, as operators
// attn_plugins_faults::NAME(out, x, right). test_emulator.py has their expected results.
#include "cuda_emulator.h"  // first

#include "common/launch.cuh"
#include "common/tensor_core.cuh"
#include "common/vector.cuh"

namespace attn_plugins {

using torch::stable::Tensor;

#define KERNEL          \
  template <bool RIGHT> \
  __global__ void __launch_bounds__(kThreads)

// Reverses each run of 256 elements of x.
KERNEL block_barrier(const float* x, float* out, int) {
  __shared__ float tile[kThreads];
  const int at = blockIdx.x * kThreads;
  tile[threadIdx.x] = x[at + threadIdx.x];
  if (RIGHT) __syncthreads();
  out[at + threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

// The same in a loop; the fault refills the tile while other threads may still be reading it.
KERNEL second_barrier(const float* x, float* out, int n) {
  __shared__ float tile[kThreads];
  for (int at = 0; at < n; at += kThreads) {
    tile[threadIdx.x] = x[at + threadIdx.x];
    __syncthreads();
    if (blockIdx.x == 0) out[at + threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
    if (RIGHT) __syncthreads();
  }
}

// Reverses each run of 32 elements of x.
KERNEL warp_barrier(const float* x, float* out, int) {
  __shared__ float tile[kThreads];
  const int at = blockIdx.x * kThreads;
  tile[threadIdx.x] = x[at + threadIdx.x];
  if (RIGHT) __syncwarp();
  out[at + threadIdx.x] = tile[threadIdx.x ^ 31];
}

// out[0] = sum of x.
KERNEL atomic_sum(const float* x, float* out, int) {
  const float mine = x[blockIdx.x * kThreads + threadIdx.x];
  if (RIGHT) {
    atomicAdd(out, mine);
  } else {
    *out += mine;
  }
}

// out[i] = x[i] + x[i + 1]; the last element has no neighbour.
KERNEL read_beyond(const float* x, float* out, int n) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = x[i] + (!RIGHT || i + 1 < n ? x[i + 1] : 0);
}

// out = x.
KERNEL write_before(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = x[i];
  if (!RIGHT && i == 0) out[-1] = 0;
}
KERNEL shared_beyond(const float* x, float* out, int) {
  __shared__ float tile[kThreads], other[kThreads];
  float* at = tile + threadIdx.x + (RIGHT ? 0 : 1);
  *at = x[blockIdx.x * kThreads + threadIdx.x];
  other[threadIdx.x] = *at;
  out[blockIdx.x * kThreads + threadIdx.x] = other[threadIdx.x];
}
KERNEL shared_uninitialised(const float* x, float* out, int) {
  __shared__ float tile[kThreads];
  if (RIGHT || threadIdx.x != 7) tile[threadIdx.x] = x[blockIdx.x * kThreads + threadIdx.x];
  out[blockIdx.x * kThreads + threadIdx.x] = tile[threadIdx.x];
}
KERNEL uninitialised_register(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  float kept;
  if (RIGHT || i != 7) kept = x[i];
  out[i] = kept;
}
KERNEL misaligned(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i % 4 == 0) store(out + i, load_constant<float, 4>(x + i + (RIGHT || i > 0 ? 0 : 1)));
}
KERNEL constant_read(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = x[i];
  if (!RIGHT) out[i] = __ldg(out + i);
}
KERNEL early_return(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (!RIGHT && threadIdx.x == 40) return;
  __syncthreads();
  out[i] = x[i];
}
KERNEL barrier_in_branch(const float* x, float* out, int) {
  if (RIGHT || threadIdx.x < 128) __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = x[blockIdx.x * kThreads + threadIdx.x];
}
KERNEL two_barriers(const float* x, float* out, int) {
  if (RIGHT || threadIdx.x % 32 < 16) __syncwarp();
  __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = x[blockIdx.x * kThreads + threadIdx.x];
}
KERNEL index_of_array(const float* x, float* out, int n) {
  float mine[4] = {};
  const int i = blockIdx.x * kThreads + threadIdx.x;
  mine[RIGHT ? i % 4 : (i % 4) + (i == n - 1)] = x[i];
  out[i] = mine[i % 4];
}

// out[i] = x[i ^ 1], by shuffles.
KERNEL divergent_shuffle(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const float mine = x[i];
  out[i] = mine;
  if (RIGHT || threadIdx.x % 32 < 16) out[i] = __shfl_xor_sync(0xffffffffu, mine, 1);
}
KERNEL foreign_mask(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const bool low = threadIdx.x % 32 < 16;
  out[i] = __shfl_xor_sync((RIGHT || i != 3 ? low : !low) ? 0xffffu : 0xffff0000u, x[i], 1);
}
KERNEL outside_mask(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = __shfl_xor_sync(threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u, x[i], RIGHT ? 1 : 16);
}
KERNEL other_intrinsic(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (RIGHT || threadIdx.x % 2) {
    out[i] = __shfl_xor_sync(0xffffffffu, x[i], 1);
  } else {
    out[i] = __shfl_sync(0xffffffffu, x[i], int(threadIdx.x) ^ 1);
  }
}
KERNEL overlapping_masks(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = __shfl_xor_sync(RIGHT || threadIdx.x % 32 != 5 ? 0xffffffffu : 0xffffu, x[i], 1);
}

// out = x, copied through shared memory by cp.async.
KERNEL asynchronous_copy(const float* x, float* out, int) {
  __shared__ alignas(16) float tile[kThreads];
  const int at = blockIdx.x * kThreads, i = threadIdx.x;
  if (i % 4 == 0) {
    const unsigned to = unsigned(__cvta_generic_to_shared(tile + i));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + at + i) : "memory");
    asm volatile("cp.async.commit_group;\n");
    if (RIGHT) asm volatile("cp.async.wait_group %0;\n" ::"n"(0));
  }
  __syncthreads();
  out[at + i] = tile[i];
}

// out = 2^x; the fault is an instruction that the emulator does not know.
KERNEL unknown_assembly(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x[i]));
  if (!RIGHT) asm("sin.approx.f32 %0, %1;" : "=f"(y) : "f"(x[i]));
  out[i] = y;
}

// out[i] = x[i] if i % 8 < 4, else 0, by one load of four elements with a predicate.
KERNEL predicated_load(const float* x, float* out, int n) {
  const int i = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (i >= n) return;
  Vector<float, 4> v;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  @p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(v.element[0]), "+f"(v.element[1]), "+f"(v.element[2]), "+f"(v.element[3])
      : "l"(x + i + (RIGHT ? 0 : i % 8 * n)), "r"(int(!RIGHT || i % 8 < 4)));
  store(out + i, v);
}

// out[i % 8] += x[i], four at a time.
KERNEL vector_atomics(const float* x, float* out, int n) {
  const int i = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (i >= n) return;
  const float part[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  add_atomically(out + i % 8 + (RIGHT ? 0 : 1), part);
}

// mma in a partial warp: all lanes must participate.
KERNEL partial_product(const float* x, float* out, int) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  float sum[4] = {};
  if (RIGHT || threadIdx.x % 32 != 31) multiply_add<__half>(sum, 0, 0, 0, 0, 0, 0);
  out[i] = x[i] + sum[0];
}

#define OPERATOR(name)                                                                                    \
  inline void name##_operator(Tensor out, Tensor x, bool right) {                                         \
    launch(right ? name<true> : name<false>, (x.numel() + kThreads - 1) / kThreads,                       \
           static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()), int(x.numel())); \
  }
#define FOR_ALL(DO)                                                                                      \
  DO(block_barrier)                                                                                      \
  DO(second_barrier)                                                                                     \
  DO(warp_barrier)                                                                                       \
  DO(atomic_sum)                                                                                         \
  DO(read_beyond) DO(write_before) DO(shared_beyond) DO(shared_uninitialised) DO(uninitialised_register) \
      DO(misaligned) DO(constant_read) DO(early_return) DO(barrier_in_branch) DO(two_barriers)           \
          DO(index_of_array) DO(divergent_shuffle) DO(foreign_mask) DO(outside_mask) DO(other_intrinsic) \
              DO(overlapping_masks) DO(asynchronous_copy) DO(unknown_assembly) DO(predicated_load)       \
                  DO(vector_atomics) DO(partial_product)
FOR_ALL(OPERATOR)

// out = x + 1, through an array from new_empty.
template <bool RIGHT>
__global__ void add_one(const float* x, float* out, int n) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (RIGHT || i != n - 1) out[i] = x[i] + 1;
}
inline void incomplete_operator(Tensor out, Tensor x, bool right) {
  const Tensor fresh = torch::stable::new_empty(x, {x.numel()});
  launch(right ? add_one<true> : add_one<false>, x.numel() / kThreads,
         static_cast<const float*>(x.data_ptr()), static_cast<float*>(fresh.data_ptr()), int(x.numel()));
  torch::stable::copy_(out, fresh);
}

// out (16, 8) = A (16, K) B (K, 8) by one warp, with ldmatrix if elements are halves. x holds A, then B.
template <class T, int K>
__global__ void product_kernel(const float* x, float* out) {
  __shared__ alignas(16) T a[16][K], transposed[8][K];
  const int lane = threadIdx.x, g = lane / 4, c = lane % 4;
  for (int i = lane; i < 16 * K; i += 32) a[i / K][i % K] = narrow_to<T>(x[i]);
  for (int i = lane; i < 8 * K; i += 32) transposed[i % 8][i / 8] = narrow_to<T>(x[16 * K + i]);
  __syncwarp();
  float sum[4] = {};
  unsigned w[4], v[2];
  if constexpr (sizeof(T) == 4) {
    w[0] = __float_as_uint(a[g][c]), w[1] = __float_as_uint(a[g + 8][c]);
    w[2] = __float_as_uint(a[g][c + 4]), w[3] = __float_as_uint(a[g + 8][c + 4]);
    v[0] = __float_as_uint(transposed[g][c]), v[1] = __float_as_uint(transposed[g][c + 4]);
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(v[0]), "r"(v[1]));
  } else {
    const unsigned first = unsigned(__cvta_generic_to_shared(&a[lane % 16][lane / 16 * 8]));
    const unsigned second = unsigned(__cvta_generic_to_shared(&transposed[lane % 8][lane / 8 % 2 * 8]));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(first));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "r"(second));
    multiply_add<T>(sum, w[0], w[1], w[2], w[3], v[0], v[1]);
  }
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * c + i % 2] = sum[i];
}
inline void product_operator(Tensor out, Tensor x, int64_t type) {
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  if (type == 0) product_kernel<__half, 16><<<1, 32>>>(from, to);
  if (type == 1) product_kernel<__nv_bfloat16, 16><<<1, 32>>>(from, to);
  if (type == 2) product_kernel<float, 8><<<1, 32>>>(from, to);
}

// out (8, 8) = x transposed, by ldmatrix.trans.
__global__ void transposed_matrix(const float* x, float* out) {
  __shared__ alignas(16) __half tile[8][8];
  for (int i = threadIdx.x; i < 64; i += 32) tile[i / 8][i % 8] = __half(x[i]);
  __syncwarp();
  union {
    unsigned word;
    __half pair[2];
  } mine{};
  const unsigned at = unsigned(__cvta_generic_to_shared(&tile[threadIdx.x % 8][0]));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(mine.word) : "r"(at));
  for (int e = 0; e < 2; ++e) out[threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2 + e] = __half2float(mine.pair[e]);
}
inline void transposed_operator(Tensor out, Tensor x) {
  transposed_matrix<<<1, 32>>>(static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()));
}

// out = x, with `bytes` of dynamic shared memory.
__global__ void dynamic_kernel(const float* x, float* out, int bytes) {
  extern __shared__ alignas(16) float memory[];
  const int last = bytes / 4 - 1;
  if (threadIdx.x == 0) memory[last] = x[0];
  __syncthreads();
  if (threadIdx.x == 1) out[0] = memory[last];
}
inline void dynamic_operator(Tensor out, Tensor x, int64_t bytes) {
  dynamic_kernel<<<1, kThreads, bytes>>>(static_cast<const float*>(x.data_ptr()),
                                         static_cast<float*>(out.data_ptr()), int(bytes));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// out[i] += 1, i being the number of blocks of a launch.
__global__ void count_kernel(float* out) {
  if (threadIdx.x == 0) atomicAdd(out + blockIdx.x, 1.0f);
}
inline void launch_operator(Tensor out, int64_t blocks) {
  launch(count_kernel, blocks, static_cast<float*>(out.data_ptr()));
}

}  // namespace attn_plugins

STABLE_TORCH_LIBRARY(attn_plugins_faults, m) {
#define DEFINE(name) m.def(#name "(Tensor(a!) out, Tensor x, bool right) -> ()");
  FOR_ALL(DEFINE)
  DEFINE(incomplete)
  m.def("product(Tensor(a!) out, Tensor x, int type) -> ()");
  m.def("transposed(Tensor(a!) out, Tensor x) -> ()");
  m.def("dynamic(Tensor(a!) out, Tensor x, int bytes) -> ()");
  m.def("launch(Tensor(a!) out, int blocks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_faults, CPU, m) {
  using namespace attn_plugins;
#define IMPLEMENT(name) m.impl(#name, EMULATED(name##_operator));
  FOR_ALL(IMPLEMENT)
  IMPLEMENT(incomplete)
  IMPLEMENT(product)
  IMPLEMENT(transposed)
  IMPLEMENT(dynamic)
  IMPLEMENT(launch)
}
