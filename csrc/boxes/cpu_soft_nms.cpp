// Soft non-maximum suppression (Bodla et al. 2017) on the CPU, in float32 like mmcv's. The order of the
// remaining boxes decides ties and is mmcv's too: the first box takes the place of the selected one, and the
// last box that of a dropped one.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

using torch::stable::Tensor;

struct Candidate {
  float x1, y1, x2, y2, score, area;
  int64_t index;
};

enum Method { NAIVE = 0, LINEAR = 1, GAUSSIAN = 2 };

float overlap(const Candidate& a, const Candidate& b, float offset) {
  const float width = std::max(0.f, std::min(a.x2, b.x2) - std::max(a.x1, b.x1) + offset);
  const float height = std::max(0.f, std::min(a.y2, b.y2) - std::max(a.y1, b.y1) + offset);
  const float intersection = width * height;
  return intersection / (a.area + b.area - intersection);
}

float decay(float iou, float threshold, float sigma, int64_t method) {
  if (method == GAUSSIAN) return std::exp(-(iou * iou) / sigma);
  if (!(iou >= threshold)) return 1;
  return method == LINEAR ? 1 - iou : 0;
}

int64_t soft_nms(Tensor boxes, Tensor scores, Tensor dets, Tensor indices, double iou_threshold, double sigma,
                 double min_score, int64_t method, int64_t offset) {
  const float* box = static_cast<const float*>(boxes.data_ptr());
  const float* score = static_cast<const float*>(scores.data_ptr());
  float* kept = static_cast<float*>(dets.data_ptr());
  int64_t* index = static_cast<int64_t*>(indices.data_ptr());
  const float margin = float(offset), threshold = float(iou_threshold), minimum = float(min_score);
  std::vector<Candidate> left(boxes.size(0));
  for (size_t i = 0; i < left.size(); ++i) {
    const float* b = box + 4 * i;
    left[i] = {b[0], b[1], b[2], b[3], score[i], (b[2] - b[0] + margin) * (b[3] - b[1] + margin), int64_t(i)};
  }
  size_t count = 0;
  for (; count < left.size(); ++count) {
    size_t best = count;
    for (size_t i = count + 1; i < left.size(); ++i)
      if (left[best].score < left[i].score) best = i;
    std::swap(left[count], left[best]);
    const Candidate chosen = left[count];
    const float row[5] = {chosen.x1, chosen.y1, chosen.x2, chosen.y2, chosen.score};
    std::copy(row, row + 5, kept + 5 * count);
    index[count] = chosen.index;
    for (size_t i = count + 1; i < left.size();) {
      left[i].score *= decay(overlap(chosen, left[i], margin), threshold, float(sigma), method);
      if (left[i].score < minimum) {
        left[i] = left.back();
        left.pop_back();
      } else {
        ++i;
      }
    }
  }
  return int64_t(count);
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("soft_nms_", TORCH_BOX(&soft_nms));
}

}  // namespace
