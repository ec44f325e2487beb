// Copyright 2026 The galvatron-hf team.
// SPDX-License-Identifier: Apache-2.0
//
// A CUDA device that does nothing, for a build of PyTorch without CUDA. Together with FakeTensorMode, which gives tensors
// a device without memory, it lets backwards, copies and streams of CUDA tensors pass. Load it before torch, then call
// register_device().

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local c10::StreamId stream_of_thread = 0;

// Autograd, FSDP and tensor factories ask the guard of a tensor's device for devices and streams.
struct IdleDevice final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kind = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return kind; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Device getDevice() const override { return {kind, device_of_thread}; }
  void setDevice(c10::Device device) const override { device_of_thread = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return stream(device, stream_of_thread); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(next.device(), stream_of_thread);
    stream_of_thread = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}

 private:
  static c10::Stream stream(c10::Device device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
};

// Parts of PyTorch ask the hooks whether CUDA is there; they look the class up by this name.
struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

IdleDevice device;

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace

extern "C" void register_device() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&device);
}
