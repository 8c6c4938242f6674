#include "encryption/libcrypto.h"

#include <dlfcn.h>

#include <initializer_list>

namespace encryption {
namespace {

template <class Function>
bool load(void* library, const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(library, name));
    return *function != nullptr;
}

bool load_all(void* library, LibCrypto* functions) {
#define LOAD(name) load(library, #name, &functions->name)
    return LOAD(EVP_CIPHER_CTX_new) && LOAD(EVP_CIPHER_CTX_free) && LOAD(EVP_aes_256_gcm) &&
           LOAD(EVP_CIPHER_CTX_ctrl) && LOAD(EVP_CipherInit_ex) && LOAD(EVP_CipherUpdate) &&
           LOAD(EVP_CipherFinal_ex) && LOAD(EVP_PKEY_new_raw_private_key) &&
           LOAD(EVP_PKEY_new_raw_public_key) && LOAD(EVP_PKEY_get_raw_public_key) &&
           LOAD(EVP_PKEY_free) && LOAD(EVP_PKEY_CTX_new) && LOAD(EVP_PKEY_CTX_free) &&
           LOAD(EVP_PKEY_derive_init) && LOAD(EVP_PKEY_derive_set_peer) && LOAD(EVP_PKEY_derive);
#undef LOAD
}

const LibCrypto* open() {
    static LibCrypto functions;
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"})
        if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL))
            if (load_all(library, &functions)) return &functions;
    return nullptr;
}

}  // namespace

const LibCrypto* LibCrypto::find() {
    static const LibCrypto* const library = open();
    return library;
}

}  // namespace encryption
