// What window attention does where a window reaches beyond the map.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

namespace attn_plugins {

// kExclude: keys outside have no weight. kZero: they are zero keys with zero values, which take part in the
// softmax. kInside: windows move inward, by multiples of the dilation, until they are on the map.
enum class Border { kExclude, kZero, kInside };

inline Border border_of(const std::string& border) {
  STD_TORCH_CHECK(border == "exclude" || border == "zero" || border == "inside",
                  "attn_plugins: border must be 'exclude', 'zero' or 'inside', got '", border, "'");
  return border == "zero" ? Border::kZero : border == "inside" ? Border::kInside : Border::kExclude;
}

}  // namespace attn_plugins
