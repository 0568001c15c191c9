// NCCL as gloo on the same memory, which refuses tensors that are not on the device.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective of NCCL returns: for the host it is done once it is enqueued.
struct Done final : c10d::Work {
  explicit Done(Tensors tensors) : tensors_(std::move(tensors)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    for (auto& tensor : tensors_)
      if (devices.empty() && tensor.is_cuda()) devices.push_back(tensor.device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  Tensors tensors_;
};

Tensor checked(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  return pretended::on_host(tensor);
}
Tensors checked(const Tensors& tensors) {
  Tensors found;
  for (auto& tensor : tensors) found.push_back(checked(tensor));
  return found;
}
std::vector<Tensors> checked(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (auto& list : lists) found.push_back(checked(list));
  return found;
}

template <class Options>
bool replace_mean_by_sum(Options& options) {  // gloo has no mean
  if (options.reduceOp != c10d::ReduceOp::AVG) return false;
  options.reduceOp = c10d::ReduceOp::SUM;
  return true;
}

struct PretendedNCCL final : c10d::Backend {
  explicit PretendedNCCL(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return false; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto own = checked(tensors);
    return done(gloo_->broadcast(own, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto own = checked(tensors);
    auto used = options;
    const bool is_mean = replace_mean_by_sum(used);
    gloo_->allreduce(own, used)->wait();
    for (auto& tensor : own)
      if (is_mean) tensor.div_(getSize());
    return c10::make_intrusive<Done>(tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto own = checked(tensors);
    return done(gloo_->allreduce_coalesced(own, options), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto own = checked(tensors);
    return done(gloo_->reduce(own, options), tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto own_out = checked(out);
    auto own_in = checked(in);
    return done(gloo_->allgather(own_out, own_in, options), out[0]);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto own_out = checked(out), own_in = checked(in);
    return done(gloo_->_allgather_base(own_out, own_in, options), {out});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto own_out = checked(out), own_in = checked(in);
    return done(gloo_->allgather_into_tensor_coalesced(own_out, own_in, options), out);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto own_out = checked(out);
    auto own_in = checked(in);
    return done(gloo_->gather(own_out, own_in, options), in);
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto own_out = checked(out);
    auto own_in = checked(in);
    return done(gloo_->scatter(own_out, own_in, options), out);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto own_out = checked(out), own_in = checked(in);
    auto used = options;
    const bool is_mean = replace_mean_by_sum(used);
    gloo_->_reduce_scatter_base(own_out, own_in, used)->wait();
    if (is_mean) own_out.div_(getSize());
    return c10::make_intrusive<Done>(Tensors{out});
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return done(gloo_->barrier(options), {}); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

 private:
  static WorkPtr done(const WorkPtr& work, Tensors tensors) {
    work->wait();
    return c10::make_intrusive<Done>(std::move(tensors));
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

namespace c10d {
struct PretendedTimer final : Timer {  // DDP asks for one
  explicit PretendedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer)
}  // namespace c10d

void bind_collectives(py::module_& m) {
  m.def("nccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<PretendedNCCL>(std::move(gloo));
  });
}
