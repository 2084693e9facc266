// What a region asks of the driver's library, with memory of the host: prototypes and structures are those of CUDA's own header.
//
// Reserved addresses can be touched only while memory is mapped there, which is a file without a name. So a touch of what was given
// back ends the process, and new memory is empty. Whatever CUDA's documentation does not permit is refused. `host_memory_...` are
// for tests: how much is held, how much there is, and which call is to fail.
#define _GNU_SOURCE
#include "cuda.h"
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULARITY = 65536, MOST = 4096 };

typedef struct {
  uintptr_t address;
  size_t size;
} Range;
typedef struct {
  int file; // 0: none
  size_t size;
  int num_maps, is_held;
} Memory;
typedef struct {
  uintptr_t address;
  size_t size;
  Memory *memory;
} Mapping;

static Range ranges[MOST];
static Memory memories[MOST];
static Mapping mappings[MOST];
static size_t held, most_held, most = SIZE_MAX;
static char failing[64];
static int num_before, failing_code, is_supported = 1;

size_t host_memory_held(void) { return held; }
size_t host_memory_most_held(void) { return most_held; }
void host_memory_limit(size_t bytes) { most = bytes; }
void host_memory_support(int is_there) { is_supported = is_there; }
int host_memory_num_ranges(void) {
  int count = 0;
  for (int i = 0; i < MOST; ++i)
    count += ranges[i].size != 0;
  return count;
}
// The call of this name fails once, after so many that do not.
void host_memory_fail(const char *name, int after, int code) {
  strncpy(failing, name, sizeof failing - 1);
  num_before = after;
  failing_code = code;
}

static CUresult planned(const char *name) {
  if (strcmp(name, failing) != 0 || num_before-- > 0)
    return CUDA_SUCCESS;
  failing[0] = 0;
  return (CUresult)failing_code;
}
#define BEGIN                                                                                                          \
  CUresult failure = planned(__func__);                                                                                \
  if (failure)                                                                                                         \
    return failure;
#define REFUSE_UNLESS(condition)                                                                                       \
  if (!(condition))                                                                                                    \
    return CUDA_ERROR_INVALID_VALUE;

static int is_memory_of_device(const CUmemAllocationProp *wanted) {
  CUmemAllocationProp expected;
  memset(&expected, 0, sizeof expected);
  expected.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  expected.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  expected.location.id = wanted->location.id;
  return wanted->location.id >= 0 && memcmp(wanted, &expected, sizeof expected) == 0;
}

static void forget_if_unused(Memory *memory) {
  if (memory->is_held || memory->num_maps)
    return;
  close(memory->file);
  memory->file = 0;
  held -= memory->size;
}

CUresult cuGetErrorName(CUresult code, const char **text) {
  switch (code) {
  case CUDA_ERROR_INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; return CUDA_SUCCESS;
  case CUDA_ERROR_OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; return CUDA_SUCCESS;
  case CUDA_ERROR_UNKNOWN: *text = "CUDA_ERROR_UNKNOWN"; return CUDA_SUCCESS;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  BEGIN
  REFUSE_UNLESS(attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
  *value = is_supported;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *wanted,
                                       CUmemAllocationGranularity_flags option) {
  BEGIN
  REFUSE_UNLESS(is_memory_of_device(wanted))
  *size = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  BEGIN
  REFUSE_UNLESS(size && size % GRANULARITY == 0 && alignment == GRANULARITY && !wanted && !flags)
  char *whole = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  uintptr_t first = ((uintptr_t)whole + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (first > (uintptr_t)whole)
    munmap(whole, first - (uintptr_t)whole);
  if (first < (uintptr_t)whole + GRANULARITY)
    munmap((void *)(first + size), (uintptr_t)whole + GRANULARITY - first);
  for (int i = 0; i < MOST; ++i)
    if (!ranges[i].size) {
      ranges[i] = (Range){first, size};
      *pointer = first;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_UNKNOWN;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  BEGIN
  for (int i = 0; i < MOST; ++i)
    REFUSE_UNLESS(!mappings[i].size || mappings[i].address + mappings[i].size <= pointer ||
                  mappings[i].address >= pointer + size)
  for (int i = 0; i < MOST; ++i)
    if (ranges[i].size == size && ranges[i].address == pointer) {
      ranges[i].size = 0;
      munmap((void *)pointer, size);
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted,
                     unsigned long long flags) {
  BEGIN
  REFUSE_UNLESS(size && size % GRANULARITY == 0 && is_memory_of_device(wanted) && !flags)
  if (held + size > most)
    return CUDA_ERROR_OUT_OF_MEMORY;
  for (int i = 0; i < MOST; ++i)
    if (!memories[i].file) {
      int file = memfd_create("device", MFD_CLOEXEC);
      if (file <= 0 || ftruncate(file, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
      memories[i] = (Memory){file, size, 0, 1};
      held += size;
      most_held = held > most_held ? held : most_held;
      *handle = i + 1;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_UNKNOWN;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN
  REFUSE_UNLESS(handle && handle <= MOST && memories[handle - 1].file && memories[handle - 1].is_held)
  memories[handle - 1].is_held = 0;
  forget_if_unused(&memories[handle - 1]);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  BEGIN
  REFUSE_UNLESS(handle && handle <= MOST && memories[handle - 1].file && memories[handle - 1].is_held)
  Memory *memory = &memories[handle - 1];
  REFUSE_UNLESS(pointer % GRANULARITY == 0 && size == memory->size && !offset && !flags)
  int is_reserved = 0, place = -1;
  for (int i = 0; i < MOST; ++i) {
    is_reserved |= ranges[i].size && pointer >= ranges[i].address && pointer + size <= ranges[i].address + ranges[i].size;
    REFUSE_UNLESS(!mappings[i].size || mappings[i].address + mappings[i].size <= pointer ||
                  mappings[i].address >= pointer + size)
    if (!mappings[i].size)
      place = i;
  }
  REFUSE_UNLESS(is_reserved && place >= 0)
  if (mmap((void *)pointer, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED)
    return CUDA_ERROR_UNKNOWN;
  mappings[place] = (Mapping){pointer, size, memory};
  ++memory->num_maps;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *wanted, size_t count) {
  BEGIN
  REFUSE_UNLESS(count == 1 && wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
  REFUSE_UNLESS(wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted->location.id >= 0)
  size_t found = 0;
  for (int i = 0; i < MOST; ++i)
    if (mappings[i].size && mappings[i].address >= pointer && mappings[i].address + mappings[i].size <= pointer + size)
      found += mappings[i].size;
  REFUSE_UNLESS(found == size)
  return mprotect((void *)pointer, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  BEGIN
  for (int i = 0; i < MOST; ++i)
    if (mappings[i].size == size && mappings[i].address == pointer) {
      int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
      if (mmap((void *)pointer, size, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        return CUDA_ERROR_UNKNOWN;
      mappings[i].size = 0;
      --mappings[i].memory->num_maps;
      forget_if_unused(mappings[i].memory);
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
}
