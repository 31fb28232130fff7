// AVX-512 and AVX2 from one source: a loop's outer function is compiled once per target and resolved when the
// library loads; the functions it calls are inlined into it.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ATTN_TARGETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ATTN_TARGETS
#endif
#define ATTN_INLINE inline __attribute__((always_inline))
