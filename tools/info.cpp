#include <cstdio>
#include <memory>

#include "commands.h"
#include "console.h"
#include "cpu/stages.h"
#include "rewy/version.h"

namespace rewy::tool {
namespace {

void print_gpu(const Device& device, int architecture) {
  const DeviceInfo info = device_info(device);
  std::printf("gpu               %s, %s\n", device_text(device).c_str(), info.name.c_str());
  std::printf("  architecture    compute capability %d.%d, %d multiprocessors\n", info.major, info.minor,
              info.multiprocessors);
  if (architecture != 0) {
    std::printf("  kernels         for at most compute capability %d.%d\n", architecture / 10, architecture % 10);
  }
  std::printf("  memory          %s, L2 cache %s\n", bytes_text(info.memory).c_str(),
              bytes_text(info.l2_cache).c_str());
  std::printf("  shared memory   %s at most a block\n", bytes_text(info.shared_per_block).c_str());
  std::printf("  driver          %s, serves CUDA %s; this build uses %s\n",
              info.driver_version.empty() ? "of unknown version" : info.driver_version.c_str(),
              cuda_version_text(info.driver).c_str(), cuda_version_text(info.runtime).c_str());
  std::printf("  copy            %.2f TB/s read and written, measured\n", copy_bandwidth(device) * 1e-12);
}

}  // namespace

void add_info(CLI::App& app, int&) {
  auto options = std::make_shared<DeviceOptions>();
  CLI::App* command = app.add_subcommand("info", "Version, processor and instruction sets; a GPU's with --device cuda");
  options->add(*command);
  command->callback([options] {
    options->require();
    std::printf("rewy %s\n", REWY_VERSION);
    std::printf("cpu               %s\n", cpu_model().c_str());
    std::printf("instruction sets  %s; %s is used\n", cpu::usable_instruction_sets().c_str(), cpu::instruction_set());
    std::printf("threads           %d\n", default_threads());
    std::printf("operators         deltanet, gdn, kda, gdn2\n");
    std::printf("backends          cpu, reference%s\n", built_for_devices() ? ", cuda" : "");
    if (options->on_gpu()) print_gpu(options->target(), options->architecture);
  });
}

}  // namespace rewy::tool
