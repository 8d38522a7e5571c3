// Memory of the fake device, and a device of torch's own kind ("privateuseone") that has it: what crosses between it and
// the host is counted, inside operators too.
//
// Every buffer ends, rounded up to 16 bytes, at a page that nobody may touch. So a kernel may read whole aligned vectors
// with a byte of a buffer in them, as on a GPU, whose allocations are whole vectors; what goes further ends the program.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

class GuardedMemory final : public c10::Allocator {
 public:
  explicit GuardedMemory(c10::DeviceType type) : device_(type, type == c10::kCPU ? -1 : 0) {}

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, device_};
    const size_t page = size_t(getpagesize()), whole = (nbytes + 15) / 16 * 16, pages = (whole + page - 1) / page * page;
    void* mapped = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "no memory for ", nbytes, " bytes");
    char* begin = static_cast<char*>(mapped);
    TORCH_CHECK(mprotect(begin + pages, page, PROT_NONE) == 0, "no guard page");
    char* data = begin + pages - whole;
    memset(data + nbytes, 0xa5, whole - nbytes);  // nothing may depend on it
    const std::lock_guard lock(mutex);
    mappings[data] = {mapped, pages + page};
    return {data, data, &release, device_};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  static void release(void* data) {
    const std::lock_guard lock(mutex);
    const auto mapping = mappings.find(data);
    munmap(mapping->second.first, mapping->second.second);
    mappings.erase(mapping);
  }

  const c10::Device device_;
  static inline std::mutex mutex;
  static inline std::unordered_map<void*, std::pair<void*, size_t>>& mappings = *new std::unordered_map<void*, std::pair<void*, size_t>>;
};

GuardedMemory on_host(c10::kCPU), on_device(c10::kPrivateUse1);
int64_t crossings = 0;  // copies between host and device, for which the host waits

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &on_device, keys, at::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &on_device, keys, at::dtype_or_default(type));
}

at::Tensor& zero(at::Tensor& tensor) {
  memset(tensor.storage().mutable_data(), 0, tensor.storage().nbytes());
  return tensor;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  TORCH_CHECK(from.is_contiguous() && to.is_contiguous() && from.nbytes() == to.nbytes(), "the fake device copies bytes");
  crossings += from.device() != to.device();
  memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("zero_", &zero);
  library.impl("_copy_from", &copy_from);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", [](const at::Tensor& tensor, at::IntArrayRef size) { return at::native::view(tensor, size); });
}

TORCH_LIBRARY_FRAGMENT(megatron_zpp, library) {
  library.def("crossings() -> int", [] { return crossings; });
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::kPrivateUse1>);

const bool is_set = (c10::SetCPUAllocator(&on_host, 255), true);

}  // namespace
