// The functions of OpenSSL's libcrypto, 1.1.1 or 3, which is opened at run time.
#pragma once

#include <cstddef>

namespace encryption {

struct LibCrypto {
    // Opened once for the process; nullptr if there is none that will do.
    static const LibCrypto* find();

    void* (*EVP_CIPHER_CTX_new)();
    void (*EVP_CIPHER_CTX_free)(void* context);
    const void* (*EVP_aes_256_gcm)();
    int (*EVP_CIPHER_CTX_ctrl)(void* context, int type, int number, void* data);
    int (*EVP_CipherInit_ex)(void* context, const void* cipher, void* engine,
                             const unsigned char* key, const unsigned char* nonce, int encrypts);
    int (*EVP_CipherUpdate)(void* context, unsigned char* out, int* out_nbytes,
                            const unsigned char* in, int nbytes);
    int (*EVP_CipherFinal_ex)(void* context, unsigned char* out, int* out_nbytes);

    void* (*EVP_PKEY_new_raw_private_key)(int type, void* engine, const unsigned char* key,
                                          size_t nbytes);
    void* (*EVP_PKEY_new_raw_public_key)(int type, void* engine, const unsigned char* key,
                                         size_t nbytes);
    int (*EVP_PKEY_get_raw_public_key)(const void* key, unsigned char* out, size_t* nbytes);
    void (*EVP_PKEY_free)(void* key);
    void* (*EVP_PKEY_CTX_new)(void* key, void* engine);
    void (*EVP_PKEY_CTX_free)(void* context);
    int (*EVP_PKEY_derive_init)(void* context);
    int (*EVP_PKEY_derive_set_peer)(void* context, void* peer);
    int (*EVP_PKEY_derive)(void* context, unsigned char* out, size_t* nbytes);
};

// Of openssl/evp.h and openssl/obj_mac.h.
constexpr int get_tag = 0x10, set_tag = 0x11, x25519 = 1034;

}  // namespace encryption
