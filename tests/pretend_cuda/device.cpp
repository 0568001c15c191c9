// A "CUDA" device whose memory is that of the host and whose kernels are those of the CPU. See __init__.py.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/cpu/CopyKernel.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace pretended {

using at::Tensor;
using c10::DeviceIndex;
constexpr auto kDevice = c10::DeviceType::CUDA;

// ---- state -------------------------------------------------------------------------------------------------------------
DeviceIndex num_devices = 2;
thread_local DeviceIndex current = 0;
bool waits_are_errors = false, counts_waits = false;
std::mutex lock;  // of everything below
std::map<std::string, int64_t> waits;
py::object* on_wait = nullptr;  // called with the name of what waits
std::atomic<int64_t> allocated{0}, most_allocated{0};

void set_current(DeviceIndex index) {
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal");
  if (index >= 0) current = index;
}

// ---- copies to the host that have not arrived ----------------------------------------------------------------------------
struct LateCopy {
  int64_t number;
  Tensor target, values;
};
std::deque<LateCopy> late_copies;
int64_t num_enqueued = 0;
std::mutex arriving;  // held until the copies have arrived: another thread that waits for them may not return before

void complete_copies(int64_t up_to) {
  std::deque<LateCopy> arrived;  // outlives the guard: to release its tensors may need the lock of Python
  std::lock_guard<std::mutex> all_arrive(arriving);
  {
    std::lock_guard<std::mutex> guard(lock);
    while (!late_copies.empty() && late_copies.front().number <= up_to) {
      arrived.push_back(std::move(late_copies.front()));
      late_copies.pop_front();
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& copy : arrived) copy.target.copy_(copy.values);
}

void wait(const std::string& what) {
  if (counts_waits) {
    {
      std::lock_guard<std::mutex> guard(lock);
      waits[what] += 1;
    }
    py::gil_scoped_acquire gil;
    if (on_wait != nullptr) (*on_wait)(what);
  }
  TORCH_CHECK(!waits_are_errors, "called a synchronizing CUDA operation: ", what);
  complete_copies(num_enqueued);
}

// ---- memory --------------------------------------------------------------------------------------------------------------
void fill_with_nan(void* start, size_t size) { std::memset(start, 0xFF, size); }

struct DeviceAllocator final : c10::Allocator {
  static constexpr size_t kHeader = 64;  // holds the size, and keeps the alignment
  static void release(void* data) {
    if (data == nullptr) return;
    char* start = static_cast<char*>(data) - kHeader;
    allocated -= *reinterpret_cast<int64_t*>(start);
    std::free(start);
  }
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::Device(kDevice, current)};
    char* start = static_cast<char*>(std::aligned_alloc(kHeader, (size + 2 * kHeader - 1) / kHeader * kHeader));
    *reinterpret_cast<int64_t*>(start) = static_cast<int64_t>(size);
    const int64_t now = allocated += static_cast<int64_t>(size);
    if (now > most_allocated) most_allocated = now;
    fill_with_nan(start + kHeader, size);
    return {start + kHeader, start + kHeader, &release, c10::Device(kDevice, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} device_allocator;

std::map<const void*, size_t> pinned_sizes;
std::mutex pinned_lock;

void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_sizes.erase(data);
  }
  std::free(data);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto found = pinned_sizes.upper_bound(data);
  if (found == pinned_sizes.begin()) return false;
  --found;
  return static_cast<const char*>(data) < static_cast<const char*>(found->first) + std::max<size_t>(found->second, 1);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(std::max<size_t>(size, 1));
    fill_with_nan(data, size);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_sizes[data] = size;
    return {data, data, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

// ---- guard and hooks -------------------------------------------------------------------------------------------------------
struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kDevice;
  DeviceGuard() = default;
  explicit DeviceGuard(c10::DeviceType) {}
  static c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    set_current(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device device) const override { set_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("stream"); }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeEvent(void*) const override { wait("event"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

}  // namespace pretended

namespace at {
using pretended::DeviceGuard;
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

struct PretendedHooks final : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  bool hasCUDA() const override { return true; }
  DeviceIndex deviceCount() const override { return pretended::num_devices; }
  int getNumGPUs() const override { return pretended::num_devices; }
  void setCurrentDevice(DeviceIndex index) const override { pretended::current = index; }
  DeviceIndex getCurrentDevice() const override { return pretended::current; }
  DeviceIndex current_device() const override { return pretended::current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = pretended::current;
    if (index >= 0) pretended::current = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return pretended::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pretended::pinned_allocator; }
  void deviceSynchronize(DeviceIndex) const override { pretended::wait("device"); }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendedHooks)
}  // namespace at

namespace pretended {

// ---- one memory under the keys of both devices ---------------------------------------------------------------------------
Tensor alias_on(const Tensor& tensor, c10::Device device) {
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(owner->mutable_data(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, device);
  c10::Allocator* allocator = device.is_cuda() ? static_cast<c10::Allocator*>(&device_allocator) : c10::GetAllocator(c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data), allocator, true);
  auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Tensor on_host(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? alias_on(tensor, c10::kCPU) : tensor;
}

std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> found;
  for (const auto& tensor : tensors) found.push_back(on_host(tensor));
  return found;
}

Tensor on_device(const Tensor& tensor, DeviceIndex index) {
  return tensor.defined() && !tensor.is_cuda() ? alias_on(tensor, c10::Device(kDevice, index)) : tensor;
}

// ---- operations with a kernel of their own ---------------------------------------------------------------------------------
Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

Tensor efficient_zeros(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool>) {
  return empty(size, dtype, layout, device, std::nullopt, std::nullopt).zero_();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!self.numel()) return self;
  if (self.is_cpu() && non_blocking && is_pinned(self.data_ptr())) {
    Tensor now = on_host(source).clone();
    if (self.is_contiguous()) fill_with_nan(self.data_ptr(), self.nbytes());  // until it is waited for
    LateCopy copy{0, self, now};  // made outside of the lock: a reference may need the lock of Python
    std::lock_guard<std::mutex> guard(lock);
    copy.number = ++num_enqueued;
    late_copies.push_back(std::move(copy));
    return self;
  }
  if (self.is_cpu()) {
    wait("copy to the host");
  } else if (source.is_cpu() && source.dim() && (!non_blocking || !is_pinned(source.data_ptr()))) {
    wait(non_blocking ? "copy of pageable memory" : "copy to the device");
  } else if (source.is_cpu() && !non_blocking) {
    wait("copy to the device");
  }
  on_host(self).copy_(on_host(source));
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  wait("item");
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(on_host(self));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < needed) {
    auto data = device_allocator.allocate(needed);
    std::memcpy(data.mutable_get(), self.storage().data(), self.storage().nbytes());
    auto* storage = self.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* found = self.unsafeGetTensorImpl();
  found->set_storage_keep_dtype(std::move(storage));
  found->set_storage_offset(offset);
  found->set_sizes_and_strides(size, stride, offset);
  return self;
}

// ---- all other operations: the kernel of the CPU on the same memory -----------------------------------------------------------
// that take a number of the host beside tensors of the device, as a tensor without dimensions
const std::set<std::string> take_numbers = {
    "add", "sub", "mul", "div", "rsub", "where", "pow", "lerp", "addcmul", "addcdiv", "minimum", "maximum", "fmin", "fmax",
    "eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max", "bitwise_and", "bitwise_or", "bitwise_xor",
    "logical_and", "logical_or", "logical_xor", "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_",
    "atan2", "fmod", "remainder", "floor_divide", "copysign", "hypot", "xlogy", "index_put_", "_index_put_impl_"};
// whose result has a size, or an error, that only the device knows
const std::set<std::string> always_wait = {
    "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount", "repeat_interleave", "equal",
    "linalg_eigh", "linalg_lstsq", "linalg_inv_ex", "_linalg_check_errors", "histc"};
const std::set<std::string> take_indices = {"index", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"};

std::string base_name(const std::string& qualified) {
  auto name = qualified.substr(qualified.find("::") + 2);
  auto plain = name.substr(0, name.size() - 1);
  return name.back() == '_' && take_numbers.count(plain) ? plain : name;
}

template <class F>
void for_each_tensor(const std::vector<c10::IValue>& values, F&& visit) {
  for (const auto& value : values) {
    if (value.isTensor()) visit(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
    else if (value.isList())
      for (const c10::IValue& entry : value.toListRef())
        if (entry.isTensor()) visit(entry.toTensor());
  }
}

// Return the device of the arguments, -1 if none is on one; refuse what CUDA refuses.
int checked_device(const std::vector<c10::IValue>& given, const std::string& name, const c10::OperatorName& full) {
  int index = -1;
  for_each_tensor(given, [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return;
    TORCH_CHECK(index < 0 || index == tensor.device().index(),
                "Expected all tensors to be on the same device, but found two CUDA devices (", full, ")");
    index = tensor.device().index();
  });
  const bool is_list = name.rfind("_foreach", 0) == 0 || name.rfind("_fused", 0) == 0;
  for_each_tensor(given, [&](const Tensor& tensor) {
    if (index < 0 || !tensor.defined() || !tensor.is_cpu() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
    if (take_indices.count(name) && tensor.dim()) return wait("index of the host");
    if (tensor.dim() == 0 && (is_list || take_numbers.count(name))) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", index,
                " and cpu! (", full, ")");
  });
  if (name == "index")
    for_each_tensor({given[1]}, [&](const Tensor& tensor) {  // of the indices; what is indexed may have any type
      const bool is_mask = tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
      if (is_mask) wait("index by a mask");
    });
  if (always_wait.count(name)) wait(name);
  return index;
}

c10::IValue with_host_tensors(const c10::IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) return on_host(value.toTensorVector());
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const c10::IValue& entry : value.toListRef())
      list.push_back(entry.isTensor() ? std::optional<Tensor>(on_host(entry.toTensor())) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
  return value;
}

// Return the argument that a result is written to, or nothing.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, const c10::Argument& result,
                                    const std::vector<c10::IValue>& given) {
  const auto* alias = result.alias_info();
  if (alias == nullptr || !alias->isWrite()) return nullptr;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* own = schema.arguments()[i].alias_info();
    if (own != nullptr && own->isWrite() && own->beforeSets() == alias->beforeSets()) return &given[i];
  }
  return nullptr;
}

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const std::string name = base_name(schema.operator_name().name);
  std::vector<c10::IValue> given(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  if (name == "_foreach_copy_") {  // between devices CUDA copies one by one
    auto to = given[0].toTensorVector(), from = given[1].toTensorVector();
    bool crosses = false;
    for (size_t i = 0; i < to.size(); ++i) crosses = crosses || to[i].device() != from[i].device();
    for (size_t i = 0; crosses && i < to.size(); ++i) copy_(to[i], from[i], given[2].toBool());
    if (crosses) return;
  }
  const int index = checked_device(given, name, schema.operator_name());
  std::optional<c10::Device> requested;
  torch::jit::Stack call;
  for (size_t i = 0; i < count; ++i) {
    if (given[i].isDevice()) requested = given[i].toDevice();
    if (schema.arguments()[i].name() == "lr" && given[i].isTensor() && given[i].toTensor().is_cuda())
      TORCH_CHECK(given[i].toTensor().scalar_type() == at::kFloat, "expected scalar type Float but found another");
    call.push_back(with_host_tensors(given[i]));
  }
  const bool is_placed = requested && requested->is_cuda() && requested->has_index();
  const DeviceIndex place = index >= 0 ? index : is_placed ? requested->index() : current;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call);
  }
  for (size_t k = 0; k < schema.returns().size(); ++k) {
    const c10::IValue& result = call[k];
    if (const auto* target = written_argument(schema, schema.returns()[k], given)) {
      if (target->isTensor() && result.isTensor() && target->toTensor().sizes() != result.toTensor().sizes()) {
        resize_(target->toTensor(), result.toTensor().sizes(), std::nullopt);  // an `out` of another size
        on_host(target->toTensor()).copy_(result.toTensor());
      }
      torch::jit::push(*stack, *target);
    } else if (result.isTensor()) {
      torch::jit::push(*stack, on_device(result.toTensor(), place));
    } else if (result.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : result.toTensorVector()) list.push_back(on_device(tensor, place));
      torch::jit::push(*stack, std::move(list));
    } else {
      torch::jit::push(*stack, result);
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
}

// Lists of tensors, and silu_backward, have kernels on CUDA, where without one they would be several operations.
void register_lists(std::vector<std::unique_ptr<torch::Library>>& libraries) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_list = name.name.rfind("aten::_foreach", 0) == 0 || name.name.rfind("aten::_fused", 0) == 0;
    if (!is_list && name.name != "aten::silu_backward") continue;
    if (!c10::Dispatcher::singleton().findSchema(name)) continue;
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__));
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    libraries.back()->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
  }
}

void resize_storage(at::Storage storage, size_t size) {
  auto data = device_allocator.allocate(size);
  if (size && storage.nbytes()) std::memcpy(data.mutable_get(), storage.data(), std::min<size_t>(size, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

}  // namespace pretended

void bind_collectives(py::module_& m);  // of collectives.cpp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretended;
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  c10::SetAllocator(kDevice, &device_allocator);
  at::setHostAllocator(at::kCUDA, &pinned_allocator, 255);
  register_lists(libraries);
  m.def("set_num_devices", [](int number) { num_devices = static_cast<DeviceIndex>(number); });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { set_current(static_cast<DeviceIndex>(index)); });
  m.def("make_waits_errors", [](bool on) { waits_are_errors = on; });
  m.def("count_waits", [](bool on, py::object called) {
    counts_waits = on;
    delete on_wait;
    on_wait = on ? new py::object(called) : nullptr;
    std::lock_guard<std::mutex> guard(lock);
    if (on) waits.clear();
  });
  m.def("waits", [] {
    std::lock_guard<std::mutex> guard(lock);
    return waits;
  });
  m.def("allocated", [] { return allocated.load(); });
  m.def("most_allocated", [] { return most_allocated.load(); });
  m.def("reset_most_allocated", [] { most_allocated = allocated.load(); });
  m.def("enqueued_copies", [] { return num_enqueued; });
  m.def("complete_copies", &complete_copies, py::call_guard<py::gil_scoped_release>());
  m.def("synchronize", [] { wait("synchronize"); }, py::call_guard<py::gil_scoped_release>());
  m.def("resize_storage", &resize_storage);
  bind_collectives(m);
}
