// What the parts of the pretended device share.
#pragma once
#include <ATen/ATen.h>

namespace pretended {

// Return a tensor of the device as one of the host in the same memory; others as they are.
at::Tensor on_host(const at::Tensor& tensor);
std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors);

}  // namespace pretended
