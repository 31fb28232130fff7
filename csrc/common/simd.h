// AVX-512 and AVX2 from one source: a loop's outer function is compiled once per target and resolved when the
// library loads; the functions it calls are inlined into it.
#pragma once

// The highest x86-64 level that kernels use: 4 (AVX-512), 3 (AVX2) or 1 (SSE2). Tests compile the lower ones.
#ifndef ATTN_CPU_LEVEL
#define ATTN_CPU_LEVEL 4
#endif

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || ATTN_CPU_LEVEL < 3
#define ATTN_TARGETS
#elif ATTN_CPU_LEVEL < 4
#define ATTN_TARGETS __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define ATTN_TARGETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define ATTN_INLINE inline __attribute__((always_inline))
