// What window attention does with keys outside the map.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

namespace attn_plugins {

// kExclude: they have no weight. kZero: they are zero keys with zero values, which take part in the softmax.
enum class Border { kExclude, kZero };

inline Border border_of(const std::string& border) {
  STD_TORCH_CHECK(border == "exclude" || border == "zero",
                  "attn_plugins: border must be 'exclude' or 'zero', got '", border, "'");
  return border == "zero" ? Border::kZero : Border::kExclude;
}

}  // namespace attn_plugins
