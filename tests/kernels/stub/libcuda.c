// What Triton's launcher needs of the driver's library, without a device: modules are kept, and launches are written down.
//
// How many parameters a kernel has, and how large each is, comes from the compiled kernel itself (EIATTR_KPARAM_INFO). So what
// is written down is what the kernel would read. $STUB_LOG: the file; nothing is written without it. $STUB_CAPABILITY: such as 90.
#include "cuda.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMS = 64, KPARAM_INFO = 0x17, FORMAT_SIZED = 4, MAX_SHARED = 232448 };

typedef struct {
  const unsigned char *image;
} Module;

typedef struct {
  char name[256];
  int num_params;
  int sizes[MAX_PARAMS];
} Function;

static int capability(void) {
  const char *text = getenv("STUB_CAPABILITY");
  return text ? atoi(text) : 90;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *size, CUlimit limit) { *size = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t size) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "an error of the stub"; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = MAX_SHARED; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  Module *made = malloc(sizeof(Module));
  made->image = image; // Triton keeps it
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { free(module); return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  const unsigned char *image = ((Module *)module)->image;
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
  const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
  Function *made = calloc(1, sizeof(Function));
  char wanted[300];
  snprintf(made->name, sizeof made->name, "%s", name);
  snprintf(wanted, sizeof wanted, ".nv.info.%s", name);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (strcmp(names + sections[i].sh_name, wanted) != 0)
      continue;
    const unsigned char *at = image + sections[i].sh_offset, *end = at + sections[i].sh_size;
    while (at + 4 <= end) {
      unsigned size = at[0] == FORMAT_SIZED ? at[2] | at[3] << 8 : 0;
      if (at[0] == FORMAT_SIZED && at[1] == KPARAM_INFO) {
        unsigned ordinal = at[8] | at[9] << 8, packed;
        memcpy(&packed, at + 12, 4);
        if (ordinal >= MAX_PARAMS)
          return CUDA_ERROR_INVALID_IMAGE;
        made->sizes[ordinal] = packed >> 18;
        if ((int)ordinal >= made->num_params)
          made->num_params = ordinal + 1;
      }
      at += 4 + size;
    }
  }
  *function = (CUfunction)made;
  return made->num_params ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t r, void *a, const cuuint64_t *d,
                                const cuuint64_t *s, const cuuint32_t *b, const cuuint32_t *e, CUtensorMapInterleave i,
                                CUtensorMapSwizzle w, CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) {
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  static FILE *log = NULL;
  static char known[4096] = "";
  const char *path = getenv("STUB_LOG");
  if (path && strcmp(path, known) != 0) {
    snprintf(known, sizeof known, "%s", path);
    log = fopen(path, "a");
  }
  if (!log)
    return CUDA_SUCCESS;
  const Function *function = (const Function *)f;
  int is_dependent = 0, num_others = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      is_dependent = config->attrs[i].value.programmaticStreamSerializationAllowed;
    else
      ++num_others;
  }
  fprintf(log, "{\"kernel\": \"%s\", \"build\": \"%p\", \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %u, \"stream\": %llu, ", function->name, (void *)f,
          config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes,
          (unsigned long long)config->hStream);
  fprintf(log, "\"is_dependent\": %d, \"num_other_attributes\": %d, \"parameters\": [", is_dependent, num_others);
  for (int i = 0; i < function->num_params; ++i) {
    fprintf(log, "%s\"", i ? ", " : "");
    for (int j = 0; j < function->sizes[i]; ++j)
      fprintf(log, "%02x", ((const unsigned char *)params[i])[j]);
    fprintf(log, "\"");
  }
  fprintf(log, "]}\n");
  fflush(log);
  return CUDA_SUCCESS;
}
